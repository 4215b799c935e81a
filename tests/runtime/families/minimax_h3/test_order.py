"""The order that a start loads before the request was validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from loader.errors import ArtifactError
from runtime.families.minimax_h3.order import default_order, likely_order


@dataclass
class Record:
    task: str
    name: str


class Prepared:
    """What a manifest says about orders."""

    def __init__(self, *orders: str) -> None:
        self.schedules = [Record(*order.split("/")) for order in orders]
        self.orders = dict.fromkeys(orders)

    def order(self, task: str, schedule: str) -> None:
        if f"{task}/{schedule}" not in self.orders:
            raise ArtifactError("not prepared", where="orders", found=f"{task}/{schedule}")


BOTH: Any = Prepared("t2va/base-8", "t2va/base-49", "fl2va/base-8")


@pytest.mark.parametrize(
    ("body", "order"),
    [
        pytest.param(None, "t2va/base-49", id="no-request"),
        pytest.param({"prompt": "a"}, "t2va/base-49", id="default-schedule"),
        pytest.param({"schedule": "base-8"}, "t2va/base-8", id="named"),
        pytest.param({"num_evaluations": 8}, "t2va/base-8", id="counted"),
        pytest.param({"first_frame": "x"}, "fl2va/base-8", id="first-frame"),
        pytest.param({"last_frame": "x", "schedule": "base-49"}, "fl2va/base-8", id="other-task-has-no-49"),
        pytest.param({"schedule": ["base-8"], "num_evaluations": {}}, "t2va/base-49", id="nonsense"),
    ],
)
def test_likely_order(body: dict[str, object] | None, order: str) -> None:
    assert likely_order(BOTH, body) == order


def test_a_task_that_is_not_prepared_falls_back_to_the_deployments_choice() -> None:
    only: Any = Prepared("t2va/base-8")
    assert likely_order(only, {"first_frame": "x"}, "t2va", "base-8") == "t2va/base-8"
    assert likely_order(only, {"first_frame": "x"}) == "t2va/base-8"


@pytest.mark.parametrize(
    ("task", "schedule", "order"),
    [("", "", "t2va/base-49"), ("fl2va", "", "fl2va/base-8"), ("", "base-8", "t2va/base-8")],
    ids=["none", "task", "schedule"],
)
def test_default_order(task: str, schedule: str, order: str) -> None:
    assert default_order(BOTH, task, schedule) == order


@pytest.mark.parametrize(("task", "schedule"), [("ref2va", ""), ("t2va", "base-5")], ids=["task", "schedule"])
def test_a_default_that_is_not_prepared_is_refused(task: str, schedule: str) -> None:
    with pytest.raises(ArtifactError, match="not prepared"):
        likely_order(BOTH, None, task, schedule)
    with pytest.raises(ArtifactError, match="not prepared"):
        default_order(BOTH, task, schedule)
