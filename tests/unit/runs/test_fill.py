from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from implicit_llm_contracts.config.fill import UNLESS_DEFAULT, AsGiven, as_config, fill
from implicit_llm_contracts.errors import ConfigError
from tests.refusals import refused


@dataclass(frozen=True)
class Phase:
    num_unroll: int
    method: Literal["plain", "damped", "anderson"] = "plain"


@dataclass(frozen=True)
class Example:
    rate: float
    steps: int
    name: str = "x"
    is_fast: bool = False
    hard_fraction: float | tuple[float, ...] = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    phases: tuple[Phase, ...] = ()
    solver: Phase | None = None
    stop: Literal["batch", "token"] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    where: Path | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, found {self.rate}")


def make(**values: Any) -> Example:
    return fill(Example, {"rate": 0.1, "steps": 3, **values}, "demo.yaml")


def test_nested_values_take_the_declared_types() -> None:
    example = make(
        rate=1,
        hard_fraction=[0.1, 1],
        betas=[0.5, 1],
        phases=[{"num_unroll": 4}, {"num_unroll": 2, "method": "damped"}],
        solver={"num_unroll": 1},
        stop="token",
        sizes={"a": 1},
        model={"deep": {"free": [1]}},
        where="some/dir",
    )
    assert example == Example(
        rate=1.0,
        steps=3,
        hard_fraction=(0.1, 1.0),
        betas=(0.5, 1.0),
        phases=(Phase(4), Phase(2, "damped")),
        solver=Phase(1),
        stop="token",
        sizes={"a": 1},
        model={"deep": {"free": [1]}},
        where=Path("some/dir"),
    )
    assert isinstance(example.rate, float)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", ".1e-2", "+1e-3"])
def test_text_with_an_exponent_is_a_number_only_where_one_is_wanted(text: str) -> None:
    example = make(rate=text, hard_fraction=[text, 1], name=text, model={"revision": text}, anything=text)
    assert (example.rate, example.hard_fraction) == (0.001, (0.001, 1.0))
    assert (example.name, example.model, example.anything) == (text, {"revision": text}, text)


@pytest.mark.parametrize("text", ["e3", "1e", "a1e3", "1e3x", "1-3"])
def test_text_that_only_looks_like_a_number_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number"):
        make(rate=text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, "demo.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        ({"colour": 3}, "demo.yaml: unknown key 'colour'; valid: anything, betas, hard_fraction"),
        ({"solver": {"num_unrol": 3}}, "demo.yaml: solver: unknown key 'num_unrol'; did you mean 'num_unroll'?"),
        ({"phases": [{"num_unroll": 1}, {}]}, "demo.yaml: phases[1]: the key 'num_unroll' is missing; add it"),
        ({"steps": True}, "demo.yaml: steps: expected an integer, found true"),
        ({"steps": 3.0}, "demo.yaml: steps: expected an integer, found 3.0"),
        ({"rate": True}, "demo.yaml: rate: expected a number, found true"),
        ({"rate": None}, "demo.yaml: rate: expected a number, found null"),
        ({"rate": "0.1"}, "demo.yaml: rate: expected a number, found the text '0.1'"),
        ({"steps": "3"}, "demo.yaml: steps: expected an integer, found the text '3'"),
        ({"steps": "1e3"}, "demo.yaml: steps: expected an integer, found the text '1e3'"),
        ({"is_fast": 1}, "demo.yaml: is_fast: expected true or false, found 1"),
        ({"name": 1}, "demo.yaml: name: expected a string, found 1"),
        ({"hard_fraction": "a"}, "demo.yaml: hard_fraction: expected a number or a list, found the text 'a'"),
        ({"hard_fraction": [0.1, "a"]}, "demo.yaml: hard_fraction[1]: expected a number, found the text 'a'"),
        ({"betas": [0.1]}, "demo.yaml: betas: expected 2 values, found 1"),
        ({"solver": {"num_unroll": 1, "method": "newton"}}, "demo.yaml: solver.method: the text 'newton' is not"),
        ({"stop": "never"}, "demo.yaml: stop: the text 'never' is not one of batch, token"),
        ({"sizes": {"a": "b"}}, "demo.yaml: sizes.a: expected an integer, found the text 'b'"),
        ({"sizes": [1]}, "demo.yaml: sizes: expected a mapping, found a list"),
        ({"rate": -1}, "demo.yaml: rate must not be negative, found -1.0"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**values)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2


def test_what_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"demo\.yaml: expected a mapping, found a list"):
        fill(Example, [1], "demo.yaml")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Counts:
    steps: int = 1
    nodes: int | str = 1
    each: tuple[int | float, ...] = ()


@pytest.mark.parametrize(("values", "key"), [({"steps": 10**23}, "steps"), ({"nodes": -(10**23)}, "nodes")])
def test_an_integer_that_counts_nothing_on_earth_is_refused(values: dict[str, Any], key: str) -> None:
    with refused(f"demo.yaml: {key}: {values[key]} is not allowed; give an integer of at most {10**15}"):
        fill(Counts, values, "demo.yaml")
    with refused(r"demo.yaml: each\[0\]: 1000.* is not allowed"):
        fill(Counts, {"each": [10**16]}, "demo.yaml")


@dataclass(frozen=True)
class Solver(AsGiven):
    tol: float = 0.05
    max_iter: int = 32
    parts: tuple[Phase, ...] = ()


@dataclass(frozen=True)
class Job:
    solver: Solver | None
    rates: tuple[float, ...] = (1.0,)
    keep: Annotated[tuple[int, ...], UNLESS_DEFAULT] = ()
    from_: Annotated[str | None, UNLESS_DEFAULT] = None


@pytest.mark.parametrize(
    "config",
    [
        {"solver": None, "rates": [1.0]},
        {"solver": {}, "rates": [0.5, 1.0], "keep": [3]},
        {"solver": {"tol": 0.05, "parts": [{"num_unroll": 2, "method": "plain"}]}, "rates": [], "from": "start"},
    ],
)
def test_the_config_of_settings_is_what_makes_them_again(config: dict[str, Any]) -> None:
    assert as_config(fill(Job, config, "job")) == config


def test_a_config_has_values_as_the_settings_have_them_and_leaves_out_what_an_identity_does_not_name() -> None:
    settings = fill(Job, {"solver": {"tol": "1e-3"}, "keep": []}, "job")
    assert as_config(settings) == {"solver": {"tol": 0.001}, "rates": [1.0]}
    assert as_config(Solver(tol=0.1)) == {"tol": 0.1, "max_iter": 32, "parts": []}
