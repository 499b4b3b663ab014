"""The tiny DeepSeek-V4 that ships with the package: its corpus, tokenizer, baseline, configuration and training.

A model of the official architecture in the official layout, small enough to live in the package, that has learnt one
thing: the Python of the standard library. Everything that made it is here; the commands are in its model card,
`dspark_jax/assets/tiny-v4/README.md`.
"""
