"""What follows a turn, in the chat templates that vLLM ships: right in each conversation, or refused in one line."""

import pytest

from tests.helpers.chat_templates import check_packaged, packaged

PACKAGED = packaged("vllm")


@pytest.mark.skipif(not PACKAGED, reason="this version of vLLM ships no chat templates")
@pytest.mark.parametrize("name", PACKAGED)
def test_templates_of_vllm(name: str) -> None:
    check_packaged(PACKAGED[name])
