"""Bodies that do not match their schema are refused in plain sentences, not in pydantic's."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given as fuzz
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headroom.errors import HeadroomError
from headroom.server import app  # imports every endpoint with its bodies
from headroom.server.anthropic_body import MessagesBody
from headroom.server.invalid_bodies import PREDICATES, refuse_invalid
from headroom.server.ollama_bodies import GenerateBody, OllamaChatBody
from headroom.server.openai_chat import ChatBody
from headroom.server.openai_completions import CompletionBody
from headroom.server.openai_embeddings import EmbeddingBody
from headroom.server.responses_body import ResponseBody
from headroom.server.schemas import Body

assert app.ENDPOINTS
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}

# The errors that pydantic documents for each kind of schema, and for each limit of it, in strict
# mode and for values that were JSON. Wrappers and functions of ours add none but `value_error`.
ERRORS: dict[str, dict[str, str]] = {
    "model": {"": "model_type"},
    "model-fields": {"": "missing"},
    "bool": {"": "bool_type"},
    "int": {"": "int_type", "ge": "greater_than_equal", "le": "less_than_equal"},
    "float": {"": "float_type", "allow_inf_nan": "finite_number"},
    "str": {
        "": "string_type",
        "min_length": "string_too_short",
        "max_length": "string_too_long",
        "pattern": "string_pattern_mismatch",
    },
    "list": {"": "list_type", "min_length": "too_short", "max_length": "too_long"},
    "dict": {"": "dict_type"},
    "literal": {"": "literal_error"},
    "none": {"": "none_required"},
}
WITHOUT_ERRORS = {
    "any", "default", "definition-ref", "definitions", "function-after", "function-before",
    "function-plain", "model-field", "no-info", "nullable", "with-info",
    "tagged-union",  # another function refuses unknown tags first
}  # fmt: skip
# Parts of a schema that check nothing: limits, values, and how a value would be described.
UNCHECKED = {"metadata", "serialization", "expected", "json_schema_input_schema", "config"}


def bodies(cls: type[Body] = Body) -> Iterator[type[Body]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from bodies(subclass)


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all schemas within one of pydantic's core schemas."""
    if isinstance(value, dict):
        if value.get("type") == "dataclass":  # what a function of ours returns
            return
        if isinstance(value.get("type"), str):
            yield value
        for key, inner in value.items():
            if key not in UNCHECKED:
                yield from schemas(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas(inner)


def test_every_error_that_a_body_of_the_server_can_raise_has_a_sentence() -> None:
    possible: set[str] = set()
    for body in bodies():
        for schema in schemas(body.__pydantic_core_schema__):
            if schema["type"] not in WITHOUT_ERRORS:
                known = ERRORS[schema["type"]]
                possible |= {
                    error for limit, error in known.items() if not limit or limit in schema
                }
    assert len(possible) > 12
    assert possible <= set(PREDICATES)


def message(schema: type[Body], body: object) -> str:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    return str(refuse_invalid(caught.value, body))


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def message_of(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "assistant", "content": list(blocks)}]}


CASES = [
    (ChatBody, 5, "The body must be an object, not 5."),
    (ChatBody, {}, "`messages` is required."),
    (ChatBody, {"messages": []}, "`messages` must have at least 1 entry, and has 0."),
    (ChatBody, {"messages": [{}]}, "`messages[0].role` is required."),
    (ChatBody, {"messages": ["hi"]}, "`messages[0]` must be an object, not a text."),
    (ChatBody, chat(tools={}), "`tools` must be a list, not an object."),
    (ChatBody, chat(tools=[{"function": {"name": "f"}}] * 1025),
     "`tools` must have at most 1024 entries, and has 1025."),
    (ChatBody, chat(temperature="hot"), "`temperature` must be a number, not a text."),
    (ChatBody, chat(temperature=1e999), "`temperature` must be a finite number."),
    (ChatBody, chat(temperature=10**400), "`temperature` must be a number, not beyond 64 bits."),
    (ChatBody, chat(top_k=2.5), "`top_k` must be a whole number, not 2.5."),
    (ChatBody, chat(top_k=True), "`top_k` must be a whole number, not true."),
    (ChatBody, chat(n=0), "`n` must be at least 1, not 0."),
    (ChatBody, chat(n=10**30), "`n` must be at most 128, not beyond 64 bits."),
    (ChatBody, chat(max_tokens=0),
     "`max_tokens` must be at least 1, or -1 for as many as the context holds."),
    (ChatBody, chat(stream="yes"), "`stream` must be true or false, not a text."),
    (ChatBody, chat(model=None, user=[]), "`user` must be a text, not a list."),
    (ChatBody, chat(chat_template_kwargs=7), "`chat_template_kwargs` must be an object, not 7."),
    (ChatBody, chat(stop=7), "`stop` must be a text or a list of texts."),
    (ChatBody, chat(reasoning_effort="huge"),
     "`reasoning_effort` must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max', "
     "not 'huge'."),
    (ChatBody, chat(tools=[{"function": {"name": "a b"}}]),
     r"`tools[0].function.name` is 'a b', which does not match ^[\w.:/-]{1,128}$."),
    (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [
        {"id": 7, "function": {"name": "f"}}]}]},
     "`messages[0].tool_calls[0].id` must be a text, not 7."),
    (ChatBody, chat(n_predict="many"), "`max_tokens` must be a whole number, not a text."),
    (CompletionBody, {"prompt": [-1]}, "`prompt`: -1 is not a token id."),
    (EmbeddingBody, {"input": "x", "encoding_format": "hex"},
     "`encoding_format` must be 'float' or 'base64', not 'hex'."),
    (ResponseBody, {"input": "x", "text": {"format": {"type": "text", "name": "x" * 65}}},
     "`text.format.name` must have at most 64 characters, and has 65."),
    (ResponseBody, {"input": [{"type": "dream"}]},
     "`input[0]`: items of type 'dream' are not supported."),
    (OllamaChatBody, {"model": "x", "options": {"top_k": "many"}},
     "`options.top_k` must be a whole number, not a text."),
    (OllamaChatBody, {"model": "x", "think": "often"},
     "`think` must be true, false or one of low, medium, high, max."),
    (GenerateBody, {"model": "x", "format": 7}, '`format` must be "json" or a JSON schema.'),
    (MessagesBody, {"messages": [USER]}, "`max_tokens` is required."),
    # pydantic adds the chosen type of a block to the path; the error leaves it out.
    (MessagesBody, message_of({"type": "text"}), "`messages[0].content[0].text` is required."),
    (MessagesBody, message_of({"type": "text", "text": 7}),
     "`messages[0].content[0].text` must be a text, not 7."),
    (MessagesBody, message_of(CALL, {**CALL, "input": "x"}),
     "`messages[0].content[1].input` must be an object, not a text."),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "body", "sentence"), CASES, ids=lambda value: str(value)[:50])
def test_a_wrong_value_is_named_by_its_path_in_a_plain_sentence(
    schema: type[Body], body: object, sentence: str
) -> None:
    assert message(schema, body) == sentence


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "text", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "id"]), inner)
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@fuzz(st.data())
def test_no_body_is_refused_in_the_words_of_pydantic(data: st.DataObject) -> None:
    with_fields = [body for body in dict.fromkeys(bodies()) if body.model_fields]
    schema = data.draw(st.sampled_from(with_fields))
    names = [field.alias or name for name, field in schema.model_fields.items()]
    body = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=3))
    try:
        schema.model_validate(body)
    except HeadroomError:
        pass
    except ValidationError as error:
        first = error.errors()[0]
        refusal = refuse_invalid(error, body)
        assert first["type"] in (*PREDICATES, "value_error")
        assert "nput should" not in str(refusal)
        place: Any = body  # the path leads to the field at fault, or to what lacks it
        for step in (refusal.param or "").replace("[", ".").replace("]", "").split("."):
            if step:
                missing = refusal.code == "missing_required_parameter"
                assert missing or not isinstance(place, dict) or step in place
                place = place[int(step)] if isinstance(place, list) else place.get(step)
