"""Drafters that guess from recorded answers, each token right with a given probability."""

from collections.abc import Iterable, Sequence
from random import Random

from headroom.spec.draft import NO_DRAFT, Draft


class ScriptedDrafter:
    """Guesses what recorded texts say, or something else, by chance; a chain or a random tree."""

    name = "ngram"

    def __init__(self, texts: Iterable[Sequence[int]], right: float, *, tree: bool = False) -> None:
        self._texts = [tuple(text) for text in texts]  # each a prompt and its answer
        self._right, self._tree = right, tree
        self.drafts: list[Draft] = []  # all that were made

    def begin(self) -> "ScriptedDrafter":
        return self

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        known = tuple(tokens)
        text = next((text for text in self._texts if text[: len(known)] == known), None)
        if text is None:  # the answer differs from the recorded one, which the test will report
            return NO_DRAFT
        chance = Random(1000 * len(known) + known[-1])
        draft = self._draft(text[len(known) :], most, chance)
        self.drafts.append(draft)
        return draft

    def _draft(self, coming: Sequence[int], most: int, chance: Random) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        right = {0: 0}  # guesses on the recorded path, and their depths
        children: dict[int, set[int]] = {}
        while len(tokens) < most:
            parent = chance.randint(0, len(tokens)) if self._tree else len(tokens)
            depth = right.get(parent, -1)
            token = chance.randrange(200)
            if 0 <= depth < len(coming) and chance.random() < self._right:
                token = coming[depth]
            if token in children.setdefault(parent, set()):
                if len(children[parent]) > 100:
                    continue
                token = next(x for x in range(300) if x not in children[parent])
            children[parent].add(token)
            tokens.append(token)
            parents.append(parent)
            if 0 <= depth < len(coming) and token == coming[depth]:
                right[len(tokens)] = depth + 1
        return Draft(tuple(tokens), tuple(parents))
