"""instructor: typed answers by tools, by JSON mode and by schema."""

from typing import Literal

import anthropic
import instructor
import openai
from cases import (
    ADDRESS,
    ASK_CALL,
    ASK_JSON,
    ASK_OWNER,
    ASK_OWNER_JSON,
    CITY,
    KEY,
    MODEL,
    OWNER,
    run,
)
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str
    people: int


class Cat(BaseModel):
    """A cat."""

    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"] = "dog"
    tricks: list[str]


class PetOwner(BaseModel):
    """Somebody who has a pet."""

    pet: Cat | Dog = Field(discriminator="kind")


class Owner(BaseModel):
    """Somebody with names, each of them once, who has a pet."""

    names: set[str]
    pet: Cat | Dog = Field(discriminator="kind")


def asked(mode, question, kind):
    client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        response_model=kind,
        max_retries=0,
    )


def ask(mode, question):
    assert asked(mode, question, City).model_dump() == CITY


def case_tools():
    ask(instructor.Mode.TOOLS, ASK_CALL)


def case_strict_tools():
    ask(instructor.Mode.TOOLS_STRICT, ASK_CALL)


def case_json():
    ask(instructor.Mode.JSON, ASK_JSON)


def case_json_schema():
    ask(instructor.Mode.JSON_SCHEMA, ASK_JSON)


def case_tools_with_a_set_and_a_choice():
    owner = asked(instructor.Mode.TOOLS, ASK_OWNER, Owner)
    assert owner.model_dump() == Owner(**OWNER).model_dump()


def case_json_schema_with_a_choice():
    owner = asked(instructor.Mode.JSON_SCHEMA, ASK_OWNER_JSON, PetOwner)
    assert owner.model_dump() == {"pet": OWNER["pet"]}


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
