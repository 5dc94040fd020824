"""The policy that the tests here share."""

from __future__ import annotations

import pytest

from edgeq.converters.convert import ConvertOptions, convert
from tests.runtime.policy.cases import Case
from tests.runtime.policy.policy_checkpoint import build


@pytest.fixture(scope="package")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("policy")
    build(folder / "checkpoint")
    convert(str(folder / "checkpoint"), folder / "m.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    return Case(folder / "checkpoint", folder / "m.edgeq")
