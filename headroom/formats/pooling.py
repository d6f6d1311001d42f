"""How the hidden states of a text's tokens become one vector, as the model's files say it."""

from typing import Literal

from headroom.errors import FormatError
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.safetensors import read_json

PoolingName = Literal["mean", "last", "cls", "rank"]

# GGUF's numbers; 0 says that the file leaves it open.
_BY_NUMBER: dict[int, PoolingName] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
# sentence-transformers' settings, of which one is true.
_BY_SETTING: dict[str, PoolingName] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
POOLING_FILE = "1_Pooling/config.json"  # beside safetensors, where sentence-transformers has it


def find_pooling(checkpoint: Checkpoint) -> PoolingName:
    """Return a checkpoint's pooling; the last token's where the files leave it open.

    A causal model's last token is the only one that has seen the whole text.
    """
    if (number := checkpoint.metadata.get_int("pooling_type", 0)) != 0:
        if number not in _BY_NUMBER:
            known = ", ".join(f"{name} ({value})" for value, name in _BY_NUMBER.items())
            raise FormatError(f"{checkpoint.path}: pooling_type is {number}; known are {known}.")
        return _BY_NUMBER[number]
    path = checkpoint.path.parent / POOLING_FILE
    if checkpoint.format != "safetensors" or not path.is_file():
        return "last"
    settings = read_json(path)
    chosen = [name for setting, name in _BY_SETTING.items() if settings.get(setting) is True]
    if len(chosen) != 1:
        raise FormatError(
            f"{path} chooses {len(chosen)} of the known ways to pool: {', '.join(_BY_SETTING)}."
        )
    return chosen[0]
