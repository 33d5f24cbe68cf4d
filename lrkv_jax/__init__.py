"""LRKV (arXiv 2601.11471) and the attention it is measured against, in JAX."""
