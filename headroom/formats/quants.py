"""Weight types: how many values a block holds, how many bytes it takes, and its names."""

from dataclasses import dataclass

from headroom.errors import FormatError


@dataclass(frozen=True, slots=True)
class QuantType:
    """One way to store values: plain floats or blocks that share a scale."""

    name: str  # lower case, as users and GGUF tools write it
    ggml_id: int  # the number in a GGUF tensor table
    block: int  # values per block; 1 for plain types
    block_bytes: int  # bytes per block
    runs: bool = True  # False: a type of tables and indices, never of a weight

    def bytes_for(self, values: int) -> int:
        """Return the bytes of `values` values, which must be whole blocks."""
        if values % self.block:
            raise FormatError(f"{values} values are not whole {self.name} blocks of {self.block}.")
        return values // self.block * self.block_bytes

    def __str__(self) -> str:
        return self.name


F32 = QuantType("f32", 0, 1, 4)
F16 = QuantType("f16", 1, 1, 2)
Q4_0 = QuantType("q4_0", 2, 32, 18)
Q4_1 = QuantType("q4_1", 3, 32, 20)
Q5_0 = QuantType("q5_0", 6, 32, 22)
Q5_1 = QuantType("q5_1", 7, 32, 24)
Q8_0 = QuantType("q8_0", 8, 32, 34)
Q2_K = QuantType("q2_k", 10, 256, 84)
Q3_K = QuantType("q3_k", 11, 256, 110)
Q4_K = QuantType("q4_k", 12, 256, 144)
Q5_K = QuantType("q5_k", 13, 256, 176)
Q6_K = QuantType("q6_k", 14, 256, 210)
Q8_K = QuantType("q8_k", 15, 256, 292)
IQ2_XXS = QuantType("iq2_xxs", 16, 256, 66)
IQ2_XS = QuantType("iq2_xs", 17, 256, 74)
IQ3_XXS = QuantType("iq3_xxs", 18, 256, 98)
IQ1_S = QuantType("iq1_s", 19, 256, 50)
IQ4_NL = QuantType("iq4_nl", 20, 32, 18)
IQ3_S = QuantType("iq3_s", 21, 256, 110)
IQ2_S = QuantType("iq2_s", 22, 256, 82)
IQ4_XS = QuantType("iq4_xs", 23, 256, 136)
I8 = QuantType("i8", 24, 1, 1, runs=False)
I16 = QuantType("i16", 25, 1, 2, runs=False)
I32 = QuantType("i32", 26, 1, 4, runs=False)
I64 = QuantType("i64", 27, 1, 8, runs=False)
F64 = QuantType("f64", 28, 1, 8, runs=False)
IQ1_M = QuantType("iq1_m", 29, 256, 56)
BF16 = QuantType("bf16", 30, 1, 2)
TQ1_0 = QuantType("tq1_0", 34, 256, 54)
TQ2_0 = QuantType("tq2_0", 35, 256, 66)
MXFP4 = QuantType("mxfp4", 39, 32, 17)
NVFP4 = QuantType("nvfp4", 40, 64, 36)
Q1_0 = QuantType("q1_0", 41, 128, 18)
Q2_0 = QuantType("q2_0", 42, 64, 18)

# Parts of quantised weights in safetensors, see quantised.py; GGUF has no numbers for them.
U8 = QuantType("u8", -1, 1, 1, runs=False)
F8_E4M3 = QuantType("f8_e4m3", -1, 1, 1, runs=False)

QUANTS = (
    F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K,
    IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS, IQ4_NL,
    MXFP4, NVFP4, TQ1_0, TQ2_0, Q1_0, Q2_0,
    I8, I16, I32, I64, F64,
)  # fmt: skip
BY_GGML_ID = {quant.ggml_id: quant for quant in QUANTS}
BY_NAME = {quant.name: quant for quant in QUANTS}

# Types that GGUF tools write and that are not read here, so that an error can name them.
_OTHER_GGML_NAMES = {
    4: "q4_2", 5: "q4_3", 9: "q8_1", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8",
    36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8",
}  # fmt: skip


def quant_of(ggml_id: int, tensor: str) -> QuantType:
    """Return the type of a GGUF tensor, or say which type it has and which are read."""
    if (quant := BY_GGML_ID.get(ggml_id)) is not None:
        return quant
    known = _OTHER_GGML_NAMES.get(ggml_id)
    kind = f"type {known.upper()} (number {ggml_id})" if known else f"the unknown type {ggml_id}"
    raise FormatError(f"Tensor {tensor!r} has {kind}, which is not supported.", hint=supported())


def supported() -> str:
    """Return the sentence that lists the types of weights that are read."""
    return f"Supported types: {', '.join(quant.name.upper() for quant in QUANTS if quant.runs)}."
