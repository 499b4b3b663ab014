"""Drafters in GGUF files of llama.cpp and of ds4."""
