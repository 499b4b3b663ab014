"""What the package brings along: a small trained model, so that the first command needs no download."""

from pathlib import Path

TINY_V4 = Path(__file__).parent / "tiny-v4"
"""A DeepSeek-V4 of 12 MB with its drafter, trained on Python's standard library; its README.md is the model card."""
