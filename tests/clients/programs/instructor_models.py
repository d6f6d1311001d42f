"""instructor: typed answers by tools, by JSON mode and by schema."""

import anthropic
import instructor
import openai
from cases import ADDRESS, ASK_CALL, ASK_JSON, CITY, KEY, MODEL, run
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    people: int


def ask(mode, question):
    client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    city = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        response_model=City,
        max_retries=0,
    )
    assert city.model_dump() == CITY


def case_tools():
    ask(instructor.Mode.TOOLS, ASK_CALL)


def case_strict_tools():
    ask(instructor.Mode.TOOLS_STRICT, ASK_CALL)


def case_json():
    ask(instructor.Mode.JSON, ASK_JSON)


def case_json_schema():
    ask(instructor.Mode.JSON_SCHEMA, ASK_JSON)


def case_responses():
    ask(instructor.Mode.RESPONSES_TOOLS, ASK_CALL)


def case_partial_objects():
    client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    cities = instructor.from_openai(client).chat.completions.create_partial(
        model=MODEL, messages=[{"role": "user", "content": ASK_CALL}], response_model=City
    )
    last = list(cities)[-1]
    assert (last.name, last.people) == (CITY["name"], CITY["people"])


def case_anthropic():
    client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
    city = instructor.from_anthropic(client).messages.create(
        model=MODEL,
        max_tokens=4096,
        messages=[{"role": "user", "content": ASK_CALL}],
        response_model=City,
        max_retries=0,
    )
    assert city.model_dump() == CITY


run(globals())
