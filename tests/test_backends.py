"""Real transformers and TransformerLens models: served exactly, restored exactly, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import sinklens as sl
from sinklens.attention import AttentionCall, AttentionResult, Edit, Inner
from sinklens.backends import backend_for
from sinklens.errors import PatchNotAppliedError, UnsupportedModelError
from sinklens.verify import verified
from tests import tiny


def logits(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=False).logits


def state(model: Any) -> tuple[object, ...]:
    hooks = tuple(len(module._forward_hooks) for module in model.modules())
    modes = tuple(module.training for module in model.modules())
    return model.config._attn_implementation, hooks, modes


def bridge(family: str, tmp_path: Path) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    tiny.causal(family).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return TransformerBridge.boot_transformers(str(tmp_path), device="cpu")


@pytest.mark.parametrize("family", tiny.CAUSAL)
def test_every_family_is_served_exactly(family: str) -> None:
    model, tokens = tiny.causal(family), tiny.tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    clean, padded = logits(model, tokens), logits(model, tokens, mask)
    proof = sl.verify(model)
    assert (proof.sites, proof.future_mass) == (2, 0.0)
    assert proof.edit_effect > 0.1
    with sl.patched(model, sl.Softmax()):
        torch.testing.assert_close(logits(model, tokens), clean, atol=1e-5, rtol=1e-5)
        real = mask.bool()
        torch.testing.assert_close(logits(model, tokens, mask)[real], padded[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", tiny.CAUSAL)
def test_an_edit_survives_generation_with_a_cache(family: str) -> None:
    model, tokens = tiny.causal(family), tiny.tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    for normalizer in (sl.DropSink(), sl.RenormalizeWithoutSink(), sl.ReLU(gauge="sink", scale="visible")):
        with sl.patched(model, normalizer, heads=[(0, 1), (1, 2)]):
            made = model.generate(
                tokens, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            longer = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
            # generate() counts positions from the first real token; a plain call of GPT-2 would count the padding too.
            positions = (longer.cumsum(-1) - 1).clamp(min=0)
            with torch.no_grad():
                whole = model(made.sequences, attention_mask=longer, position_ids=positions, use_cache=False).logits
            at_once = whole[:, 19:-1]
        torch.testing.assert_close(torch.stack(made.logits, 1), at_once, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", tiny.UNROUTED)
def test_families_with_their_own_attention_are_refused(family: str) -> None:
    model = tiny.causal(family)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match="does not use transformers' AttentionInterface: expected a family"):
        sl.verify(model)
    assert state(model) == before


def test_encoders_are_served_as_bidirectional() -> None:
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**tiny.BASE)).eval()
    sl.verify(model)
    assert {site.kind for site in backend_for(model).sites} == {"bidirectional"}


def test_encoder_decoders_need_a_probe_and_say_so() -> None:
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ).eval()
    with pytest.raises(UnsupportedModelError, match="does not take plain token ids"):
        sl.verify(model)
    assert sl.verify(model.get_encoder()).sites == 2


def test_other_objects_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="this object cannot be routed: expected a transformers"):
        sl.verify(torch.nn.Linear(2, 2))


class TestRestoring:
    def test_after_an_exception_in_layer_1(self) -> None:
        """Trial case 2: the exception propagates and everything is as before, the user's hook included."""
        model, tokens = tiny.causal(), tiny.tokens()
        seen: list[int] = []
        model.model.layers[0].register_forward_hook(lambda *_: seen.append(0))
        clean, before = logits(model, tokens), state(model)

        def explode(call: AttentionCall, inner: Inner) -> AttentionResult:
            if call.site.layer == 1:
                raise RuntimeError("inside layer 1")
            return inner(call)

        with pytest.raises(RuntimeError, match="inside layer 1"), backend_for(model).attach(explode):
            logits(model, tokens)
        assert state(model) == before
        assert torch.equal(logits(model, tokens), clean)
        assert seen

    def test_nested_patches_and_the_mode(self) -> None:
        """Trial case 16 and nesting: inner patches win, each level ends where it began."""
        model, tokens = tiny.causal("GPT2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0), tiny.tokens()
        clean = logits(model, tokens)
        with sl.patched(model, sl.Constant(), heads=[(0, 0)]):
            outer = logits(model, tokens)
            with sl.patched(model, sl.Softmax(), heads=[(0, 0)]):
                torch.testing.assert_close(logits(model, tokens), clean)
            assert torch.equal(logits(model, tokens), outer)
        assert torch.equal(logits(model, tokens), clean)
        model.train()
        sl.scan(model, sl.PromptSet.from_tokens(tokens), progress=False)
        assert all(module.training for module in model.modules())
        with pytest.raises(PatchNotAppliedError, match="attention dropout would be lost"), sl.patched(model, sl.ReLU()):
            model(tokens)

    @pytest.mark.parametrize("start", ["eager", "sdpa"])
    def test_the_implementation(self, start: str) -> None:
        model = tiny.causal()
        model.set_attn_implementation(start)
        with sl.patched(model, sl.ReLU()):
            pass
        assert model.config._attn_implementation == start


def test_a_softmax_route_equals_eager_and_sees_no_future() -> None:
    """Trial case 3."""
    model, tokens = tiny.causal(gain=1), tiny.tokens()
    model.set_attn_implementation("eager")
    eager = logits(model, tokens)
    with sl.patched(model, sl.Softmax()):
        torch.testing.assert_close(logits(model, tokens), eager, atol=1e-6, rtol=1e-6)
    assert sl.verify(model).future_mass == 0


def test_a_patched_head_stays_causal() -> None:
    """Trial case 4: token 7 of 8 changes, logits 0..6 do not."""
    model, tokens = tiny.causal(), tiny.tokens(2, 8)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    with sl.patched(model, sl.ReLU()):
        assert torch.equal(logits(model, tokens)[:, :7], logits(model, changed)[:, :7])


def test_silencing_a_layer_leaves_its_output_bias() -> None:
    """Trial case 11."""
    model = tiny.causal("GPT2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.bias.normal_()
    outputs: list[torch.Tensor] = []
    model.transformer.h[1].attn.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    with sl.patched(model, sl.Constant(), heads=[(1, h) for h in range(4)]):
        outputs.clear()
        logits(model, tiny.tokens())
    expected = model.transformer.h[1].attn.c_proj.bias.expand_as(outputs[0])
    assert torch.equal(outputs[0], expected)


def test_ablating_nothing_is_the_identity_and_every_sequence_of_a_batch_is_edited() -> None:
    model, tokens = tiny.causal(), tiny.tokens(3, 12)
    clean = logits(model, tokens)
    with sl.patched(model, sl.ReLU(), heads=[(0, 2)]):
        batch = logits(model, tokens)
        singles = torch.cat([logits(model, tokens[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(batch, singles, atol=1e-5, rtol=1e-4)
    assert bool(((batch - clean).abs().amax((1, 2)) > 1e-3).all())


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma3", "GPTOSS"])
def test_a_bridge_agrees_with_its_transformers_model(family: str, tmp_path: Path) -> None:
    """Trial case 15: same scores, same patch, and the user's own hook still fires."""
    lens, model = bridge(family, tmp_path), tiny.causal(family)
    tokens = tiny.tokens(3, 14)
    prompts = sl.PromptSet.from_tokens(tokens)
    ours, theirs = sl.scan(model, prompts, progress=False), sl.scan(lens, prompts, progress=False)
    numbers = ["sink_mass", "located_mass", "first_four_mass", "entropy", "output_norm", "row_sum", "dormant_fraction"]
    difference = (ours.frame[numbers] - theirs.frame[numbers]).abs().max().max()
    assert difference < 1e-5
    fired: list[str] = []
    lens.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: fired.append(hook.name))
    with torch.no_grad():
        clean = lens(tokens)
    for normalizer in (sl.ReLU(), sl.DropSink(), sl.RenormalizeWithoutSink(), sl.Constant(torch.ones(8))):
        fired.clear()
        with torch.no_grad(), sl.patched(lens, normalizer, heads=[(0, 1), (1, 3)]):
            patched = lens(tokens)
        with sl.patched(model, normalizer, heads=[(0, 1), (1, 3)]):
            torch.testing.assert_close(patched, logits(model, tokens), atol=1e-4, rtol=1e-3)
        assert float((patched - clean).abs().max()) > 1e-2
        assert fired
    with torch.no_grad():
        assert torch.equal(lens(tokens), clean)


class TestPatchedInput:
    def test_heads_out_of_range_name_the_range(self) -> None:
        model = tiny.causal()
        with (
            pytest.raises(
                IndexError, match=r"L1H4 is not in layer 1: expected a query head in 0\.\.3 \(2 kv heads\), got 4"
            ),
            sl.patched(model, sl.ReLU(), heads="L1H4"),
        ):
            pass
        with (
            pytest.raises(IndexError, match=r"L7H0 is in no attention layer: expected a layer in 0\.\.1, got 7"),
            sl.patched(model, sl.ReLU(), heads=[(7, 0)]),
        ):
            pass

    def test_a_patch_that_is_never_reached_raises(self) -> None:
        model = tiny.causal()
        with (
            pytest.raises(
                PatchNotAppliedError, match=r"patched layers were not reached: expected calls from layers \[1\]"
            ),
            sl.patched(model, sl.ReLU(), heads=[(1, 0)]),
        ):
            model.model.layers[0].self_attn(
                torch.zeros(1, 4, 32), position_embeddings=(torch.ones(1, 4, 8), torch.zeros(1, 4, 8))
            )

    def test_a_mapping_gives_each_head_its_own(self) -> None:
        model, tokens = tiny.causal(), tiny.tokens()
        with sl.patched(model, {"L0H1": sl.ReLU(), (0, 2): sl.Constant()}) as heads:
            both = logits(model, tokens)
        assert heads == sl.Heads.of("L0H1,L0H2")
        with sl.patched(model, sl.ReLU(), "L0H1"), sl.patched(model, sl.Constant(), "L0H2"):
            torch.testing.assert_close(logits(model, tokens), both)

    def test_nonsense(self) -> None:
        model = tiny.causal()
        for arguments, text in [
            (("relu",), "a patch is a normalizer or a mapping from head to normalizer: expected e.g. ReLU"),
            ((sl.ReLU(), []), "a patch needs heads: expected at least one head, got none"),
            ((sl.ReLU(), "L1"), "a head is written as layer and head: expected a form like L18H8, got 'L1'"),
        ]:
            with pytest.raises(sl.InputError, match=text), sl.patched(model, *arguments):
                pass


def test_a_route_may_replace_the_result() -> None:
    model, tokens = tiny.causal(), tiny.tokens()

    def doubled(call: AttentionCall, inner: Inner) -> AttentionResult:
        result = inner(call.edited(Edit((0,), sl.Constant())))
        return AttentionResult(result.call, result.output * 2, result.plain)

    clean = logits(model, tokens)
    with backend_for(model).attach(doubled) as log:
        assert float((logits(model, tokens) - clean).abs().max()) > 0.1
    assert log.calls == {0: 1, 1: 1}


def test_a_replaced_output_reaches_a_bridge(tmp_path: Path) -> None:
    """A route may return what no call evaluates to; a bridge that went on with its own output would hide that."""
    lens, tokens = bridge("Llama", tmp_path), tiny.tokens()
    hooked = verified(lens)

    def silent(call: AttentionCall, inner: Inner) -> AttentionResult:
        return AttentionResult(call, torch.zeros_like(inner(call).output))

    with torch.no_grad(), hooked.attach(silent):
        replaced = hooked.forward(tokens)
    with torch.no_grad(), sl.patched(lens, sl.Constant()):
        expected = hooked.forward(tokens)
    torch.testing.assert_close(replaced, expected)
    assert not torch.allclose(replaced, hooked.forward(tokens))
