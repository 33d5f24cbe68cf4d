"""Builds a config's dataset, tokenizer and token store ahead of time.

    python -m lrkv_jax.prepare --config configs/tiny.py

It takes train.py's flags for the config and its fields. Killed and started again it keeps what was finished; where all
is there it only prints.
"""

from __future__ import annotations

from lrkv_jax.config import parse_command
from lrkv_jax.data import open_store
from lrkv_jax.data.split import SPLITS
from lrkv_jax.settings import command


@command
def main() -> int:
    """Prepares and prints what there is."""
    config = parse_command("python -m lrkv_jax.prepare", __doc__, trains=False).config
    store = open_store(config.data, config.model.vocab)
    print(f"{store.directory}\nfingerprint {store.fingerprint}\ntokenizer   {store.tokenizer.vocab_size} tokens")
    print(f"{'split':<12}{'documents':>12}{'tokens':>16}{'bytes':>16}")
    for split in SPLITS:
        counts = store.counts(split)
        print(f"{split:<12}{counts.documents:>12,}{counts.tokens:>16,}{counts.bytes:>16,}")
    if store.mixture:
        print(f"train examples and their answer tokens, by file\n{table(store.mixture)}")
    left = store.note or f"{store.dropped_tokens:,} train tokens left over"
    print(f"{store.records:,} records of {store.record_tokens:,} tokens; {left}")
    return 0


def table(mixture: dict[str, dict[str, int]]) -> str:
    """What the train split has of each file, and how often it takes that."""
    width = max(12, *map(len, mixture))
    lines = [f"{'file':<{width}}{'examples':>12}{'tokens':>16}{'repeats':>9}{'examples':>12}{'tokens':>16}"]
    for name, of in mixture.items():
        once, taken = (f"{of[f'examples{end}']:>12,}{of[f'tokens{end}']:>16,}" for end in ("", "_taken"))
        lines.append(f"{name:<{width}}{once}{of['repeats']:>9}{taken}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
