"""Records: what a frozen dataclass gives, and what it refuses."""

import copy
import dataclasses
import pickle

import pytest

from kiln.runtime.record import record


@record
class Point:
    """A record of the tests."""

    x: int
    y: int = 2


def test_it_is_made_by_position_name_and_default() -> None:
    assert Point(1) == Point(1, 2) == Point(y=2, x=1)
    assert (Point(1).x, Point(1).y) == (1, 2)
    assert repr(Point(1, 3)) == "Point(x=1, y=3)"
    assert len({Point(1), Point(1, 2), Point(2)}) == 2
    assert Point(1) != dataclasses.astuple(Point(1))  # type: ignore[comparison-overlap]


def test_the_dataclasses_module_takes_it() -> None:
    assert [f.name for f in dataclasses.fields(Point)] == ["x", "y"]
    assert dataclasses.replace(Point(1), y=7) == Point(1, 7)
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 2}
    assert pickle.loads(pickle.dumps(Point(4))) == copy.copy(Point(4)) == Point(4)


@pytest.mark.parametrize(
    ("args", "named", "why"),
    [
        ((), {}, "missing x"),
        ((1, 2, 3), {}, "takes x, y"),
        ((1,), {"x": 1}, "each once"),
        ((1,), {"z": 1}, "has no z"),
        ((1, 2), {"z": 1}, "has no z"),
    ],
)
def test_other_arguments_are_refused(args: tuple[int, ...], named: dict[str, int], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Point(*args, **named)


def test_it_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.y
    assert point == Point(1)
