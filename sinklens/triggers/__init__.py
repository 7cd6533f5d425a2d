"""Trigger-conditional heads: heads that sleep on the sink until a token wakes them, or park when one comes."""
