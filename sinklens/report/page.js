"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  if (!$("grid")) return;
  const { columns, rows, linked, scale, verdicts } = JSON.parse($("data").textContent);
  const sections = new Set(linked);
  const NS = "http://www.w3.org/2000/svg";
  const name = (row) => `L${row[0]}H${row[1]}`;
  const at = (key) => { const i = columns.findIndex((c) => c.key === key); return i < 0 ? -1 : i + 2; };
  const show = (value) => value === null ? "–"
    : typeof value === "string" ? value : Number.isInteger(value) ? String(value)
    : Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(3);

  // ---- the map ----
  const layers = 1 + Math.max(...rows.map((r) => r[0])), heads = 1 + Math.max(...rows.map((r) => r[1]));
  const size = Math.max(7, Math.min(20, Math.floor(900 / heads), Math.floor(760 / layers)));
  const step = (many) => { let s = 1; while (many / s > 20 || s * size < 18) s *= 2; return s; };
  const place = new Map(rows.map((row) => [`${row[0]},${row[1]}`, row]));
  const make = (tag, attributes, parent, text) => {
    const node = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const svg = make("svg", { width: 50 + heads * size, height: 44 + layers * size }, $("grid"));
  for (let h = 0; h < heads; h += step(heads)) make("text", { x: 44 + (h + 0.5) * size, y: 28, "text-anchor": "middle" }, svg, h);
  for (let l = 0; l < layers; l += step(layers)) make("text", { x: 38, y: 36 + (l + 0.5) * size + 4, "text-anchor": "end" }, svg, l);
  make("text", { x: 44, y: 12 }, svg, "head");
  make("text", { x: 0, y: 28 }, svg, "layer");
  const cells = rows.map((row) => {
    const cell = make("rect", { x: 44 + row[1] * size, y: 36 + row[0] * size, width: size - 1, height: size - 1 }, svg);
    cell.row = row;
    return cell;
  });
  const cursor = make("rect", { class: "cursor", width: size + 1, height: size + 1, x: -99, y: -99 }, svg);
  const choices = columns.filter((c) => !c.text && c.key !== "kv_head" || c.key === "verdict");
  for (const column of choices) $("colour").append(new Option(column.label, column.key));
  const mix = (share) => {
    const x = Math.min(Math.max(share, 0), 1) * (scale.length - 1), i = Math.min(Math.floor(x), scale.length - 2);
    return `rgb(${scale[i].map((v, k) => Math.round(v + (x - i) * (scale[i + 1][k] - v)))})`;
  };
  function paint() {
    const key = $("colour").value, column = at(key), words = key === "verdict";
    const values = rows.map((r) => r[column]).filter((v) => v !== null);
    const low = words ? 0 : Math.min(0, ...values), high = words ? 1 : Math.max(...values, low + 1e-9);
    for (const cell of cells) {
      const value = cell.row[column];
      cell.setAttribute("fill", value === null ? "var(--tint)" : words ? verdicts[value] ?? "#777" : mix((value - low) / (high - low)));
    }
    const lines = words ? [...new Set(values)].map((v) => [verdicts[v] ?? "#777", v])
      : [0, 0.25, 0.5, 0.75, 1].map((s) => [mix(s), show(low + s * (high - low))]).reverse();
    $("key").replaceChildren(document.createElement("strong"), document.createElement("ul"));
    $("key").firstChild.textContent = words ? "verdict" : `${columns[column - 2].label}: ${columns[column - 2].unit}`;
    for (const [color, text] of lines) {
      const item = document.createElement("li"), patch = document.createElement("i");
      patch.style.background = color;
      item.append(patch, text);
      $("key").lastChild.append(item);
    }
  }
  let here = rows[0];
  function point(row) {
    here = row;
    cursor.setAttribute("x", 43 + row[1] * size);
    cursor.setAttribute("y", 35 + row[0] * size);
    const parts = columns.map((c, i) => [c, row[i + 2]]).filter(([, v]) => v !== null).map(([c, v]) => `${c.label} ${show(v)}`);
    $("at").textContent = `${name(row)}: ${parts.join("; ")}`;
  }
  function open(row) {
    if (sections.has(name(row))) location.hash = name(row);
    else { $("contains").value = name(row); fill(); $("contains").focus(); }
  }
  svg.addEventListener("mousemove", (event) => event.target.row && point(event.target.row));
  svg.addEventListener("click", (event) => event.target.row && open(event.target.row));
  $("grid").addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter") open(here);
    if (!move) return;
    event.preventDefault();
    let [l, h] = here;
    do { l += move[0]; h += move[1]; } while (l >= 0 && h >= 0 && l < layers && h < heads && !place.has(`${l},${h}`));
    if (place.has(`${l},${h}`)) point(place.get(`${l},${h}`));
  });
  $("grid").addEventListener("focus", () => point(here));
  $("colour").addEventListener("change", paint);
  if (choices.length) paint();

  // ---- the table ----
  const head = document.createElement("tr"), mass = at("sink_mass");
  let sorted = mass > 0 ? mass : 0, down = mass > 0, limit = 60;
  const titles = [{ label: "head", unit: "", text: true }, ...columns];
  titles.forEach((column, i) => {
    const cell = document.createElement("th"), button = document.createElement("button"), unit = document.createElement("small");
    cell.scope = "col";
    button.type = "button";
    button.textContent = column.label;
    unit.textContent = column.unit;
    const index = i ? i + 1 : 0;
    button.addEventListener("click", () => { down = sorted === index ? !down : !column.text; sorted = index; fill(); });
    cell.append(button, unit);
    head.append(cell);
  });
  $("table").tHead.append(head);
  const order = (a, b) => {
    const x = a[sorted], y = b[sorted];
    if (x === null || y === null) return (x === null) - (y === null);
    const less = sorted === 0 ? a[0] - b[0] || a[1] - b[1] : typeof x === "string" ? x.localeCompare(y) : x - y;
    return down ? -less : less;
  };
  function fill() {
    const text = $("contains").value.trim().toLowerCase(), least = Number($("least").value) || 0;
    const exact = /^l\d+h\d+$/.test(text);
    const chosen = rows.filter((row) => (mass < 0 || least <= 0 || row[mass] >= least) && (!text || (exact ? name(row).toLowerCase() === text
      : [name(row), ...row.slice(2)].some((v) => typeof v === "string" && v.toLowerCase().includes(text)))));
    chosen.sort(order);
    $("table").tBodies[0].replaceChildren(...chosen.slice(0, limit).map((row) => {
      const line = document.createElement("tr"), first = document.createElement("th");
      first.scope = "row";
      if (sections.has(name(row))) {
        const link = document.createElement("a");
        link.href = `#${name(row)}`;
        link.textContent = name(row);
        first.append(link);
      } else first.textContent = name(row);
      line.append(first, ...columns.map((column, i) => {
        const cell = document.createElement("td");
        cell.textContent = show(row[i + 2]);
        if (column.text) cell.className = "words";
        return cell;
      }));
      return line;
    }));
    [...head.cells].forEach((cell, i) => {
      if ((i ? i + 1 : 0) === sorted) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    $("count").textContent = `${chosen.length} of ${rows.length} heads` + (chosen.length > limit ? `, first ${limit} shown` : "");
    $("more").hidden = chosen.length <= limit;
  }
  $("more").addEventListener("click", () => { limit += 240; fill(); });
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["contains", "least"]) $(id).addEventListener("input", () => { limit = 60; fill(); });
  fill();
})();
