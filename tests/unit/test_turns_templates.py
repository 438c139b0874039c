"""What follows a turn, in the chat templates of model families: right in each conversation, or refused in one line."""

import pytest

from tests.helpers.chat_templates import FAMILIES, REFUSED, check, check_packaged, packaged

PACKAGED = packaged("trl")
LEAST = {"single": 28, "channels": 26}  # conversations with one call, with each end token


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_turn_is_what_the_whole_conversation_has(family: str) -> None:
    right, wrong = check(FAMILIES[family])
    assert not wrong and right >= LEAST.get(family, 17)


@pytest.mark.parametrize("family", REFUSED)
def test_a_template_that_no_rule_fits_is_refused(family: str) -> None:
    template, problem = REFUSED[family]
    with pytest.raises(ValueError, match=r"^model.path: 'models/m': its chat template ") as caught:
        check(template)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.full
@pytest.mark.skipif(not PACKAGED, reason="trl, which ships chat templates, is not installed")
@pytest.mark.parametrize("name", PACKAGED)
def test_templates_of_a_package(name: str) -> None:
    check_packaged(PACKAGED[name])
