"""docs/reference/errors.md has every class of the error tree, and every message in the source."""

import inspect
import re
import textwrap

import pytest

from docs.generated import error_classes, error_messages, error_tree
from docs.messages import messages
from edgeasync import errors


def test_every_class_says_when_why_and_what_to_do():
    rows = [row.strip("| ").split(" | ") for row in error_classes().splitlines()[2:]]
    assert {row[0].strip("`") for row in rows} == {error.__name__ for error in error_tree()}
    assert all(len(row) == 5 and all(cell.endswith(".") for cell in row[2:]) for row in rows)


def test_the_list_in_the_module_has_every_class_with_its_code():
    listed = re.findall(r"(\w+Error) +(\d+)\b", inspect.getdoc(errors))
    assert {(error.__name__, str(error.exit_code)) for error in error_tree()} == set(listed)


@pytest.fixture
def found(tmp_path):
    """Return what is collected from a module of code."""

    def collect(code):
        (tmp_path / "pack").mkdir()
        (tmp_path / "pack/part.py").write_text(textwrap.dedent(code))
        return {(each.error, each.module, each.text) for each in messages(tmp_path / "pack")}

    return collect


def test_messages_are_collected_with_names_for_values(found):
    code = """
    WAY = "write --out FILE"
    class OurError(Exception): ...
    class InnerError(OurError): ...

    def check(path, names, self, wrong):
        if names:
            raise OurError(f"{path}: {len(names)} of {', '.join(map(repr, self.known))}; {WAY}")
        raise InnerError("no file" if path else f"a {'big' if wrong else 'small'} file")

    def explain(path):
        sentence = "it is " + f"{path.name!r}"
        if path:
            sentence = "it is gone"
        return OurError(sentence)

    def refuse(path):
        raise OurError(why(path)) from None

    def why(path):
        return f"not {path.parts[0]}, sorry"
    """
    assert found(code) == {
        ("OurError", "pack.part", "<path>: <names> of <known>; write --out FILE"),
        ("InnerError", "pack.part", "no file"),
        ("InnerError", "pack.part", "a (big | small) file"),
        ("OurError", "pack.part", "it is <name>"),
        ("OurError", "pack.part", "it is gone"),
        ("OurError", "pack.part", "not <parts>, sorry"),
    }


def test_the_page_has_the_messages_of_the_package_by_class():
    page = error_messages()
    assert "### HubUnreachableError\n" in page
    for message in messages():
        assert message.text in page
    assert not re.search(r"^- `[^`\n]*`[^`\n]+$", page, re.MULTILINE), "a message ends its code early"
