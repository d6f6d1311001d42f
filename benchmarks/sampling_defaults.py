"""Compares sampling settings for a small model: right answers to simple questions, repetitions.

    python benchmarks/sampling_defaults.py [MODEL] [--seeds 6]

The defaults of models whose files recommend nothing (`headroom/formats/sampling.py`) were chosen
by it.
"""

import argparse
import re
from collections import Counter

from headroom import LLM, SamplingParams
from headroom.formats.sampling import FALLBACK, SMALL_FALLBACK

QUESTIONS = {  # and a pattern that only right answers have
    "What is the capital of France?": "Paris",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
    "How many days are in a week?": "7|seven",
    "What color is the sky on a clear day?": "blue",
    "Which planet do we live on?": "Earth",
    "What gas do humans breathe in to live?": "[Oo]xygen",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the largest ocean on Earth?": "Pacific",
    "What do bees make?": "[Hh]oney",
    "What is frozen water called?": r"\b[Ii]ce",
}
LONG = ("Write a short story about a fox.", "Explain why the sky is blue.")
SETTINGS = {
    "small fallback": SMALL_FALLBACK,
    "small fallback, penalty 1.05": {**SMALL_FALLBACK, "repetition_penalty": 1.05},
    "small fallback, no penalty": {**SMALL_FALLBACK, "repetition_penalty": 1.0},
    "fallback": FALLBACK,
    "temperature 1": {"temperature": 1.0},
}
SHORT_TOKENS, LONG_TOKENS = 80, 250
REPEATED = 4  # words in a row that come so many times make a repetition


def repeats(text: str) -> bool:
    """Return whether a text has some words in a row again and again."""
    words = text.split()
    runs = Counter(tuple(words[at : at + REPEATED]) for at in range(len(words) - REPEATED + 1))
    return max(runs.values(), default=0) >= REPEATED


def main() -> None:
    """Ask all questions under each of the settings, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    with LLM(arguments.model, context=1024) as llm:

        def answer(question: str, settings: dict[str, float], seed: int, tokens: int) -> str:
            params = SamplingParams(max_tokens=tokens, seed=seed, **settings)
            return llm.chat([{"role": "user", "content": question}], params).text

        for name, settings in SETTINGS.items():
            seeds = range(arguments.seeds)
            short = [
                (answer(question, settings, seed, SHORT_TOKENS), pattern)
                for question, pattern in QUESTIONS.items()
                for seed in seeds
            ]
            long = [answer(text, settings, seed, LONG_TOKENS) for text in LONG for seed in seeds]
            right = sum(bool(re.search(pattern, text)) for text, pattern in short)
            repeated = sum(map(repeats, [text for text, _ in short] + long))
            print(
                f"{name}: {right} of {len(short)} right, "
                f"{repeated} of {len(short) + len(long)} repeat themselves",
                flush=True,
            )


if __name__ == "__main__":
    main()
