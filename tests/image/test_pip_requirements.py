import pytest

from forkd.errors import InvalidInput
from forkd.image.requirements import MAX_REQUIREMENTS, check_requirements, parse_requirements


@pytest.mark.parametrize(
    "text",
    [
        "numpy",
        "numpy==1.26.4",
        "Django >= 4.2, < 5",
        "uvicorn[standard]~=0.30",
        "a-b_c.d === 1.0+local",
        'tomli>=1; python_version < "3.11" and sys_platform == "linux"',
        f"six==1.16.0 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}",
    ],
)
def test_requirements_by_name_are_taken(text: str) -> None:
    assert check_requirements([text, f" {text} "]) == (text,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((option, "options are not read") for option in ("-e .", "--index-url=x", "-r other.txt", "-i x", "--pre")),
        *(
            (text, "expected a package")
            for text in (
                "",
                "numpy scipy",
                "numpy==",
                "numpy @ https://example.com/numpy.whl",
                "https://example.com/numpy.whl",
                "./numpy.whl",
                "../numpy",
                "/tmp/numpy.whl",
                "file:///tmp/numpy.whl",
                "numpy\n--index-url=x",
                "numpy; \n-e .",
                "numpy --install-option=x",
                "numpy --hash=md5:abc",
                "numpy\0",
                "n\u00fcmpy",
                "n" * 5000,
            )
        ),
    ],
)
def test_addresses_paths_and_options_are_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        check_requirements([text])
    assert caught.value.hint is not None
    assert len(caught.value.message) < 200


def test_a_file_is_read_as_pip_reads_it() -> None:
    text = "# tools\n\nsix==1.16.0  # old\nnumpy \\\n  ==1.26.4\r\nname#not-a-comment==1\n"
    with pytest.raises(InvalidInput, match=r"requirements\.txt, line 6: "):
        parse_requirements(text, "requirements.txt")
    lines = parse_requirements(text.replace("name#not", "name  #not") + "last \\", "requirements.txt")
    assert lines == ("six==1.16.0", "numpy    ==1.26.4", "name", "last")


def test_the_line_of_an_error_is_the_first_of_those_joined() -> None:
    with pytest.raises(InvalidInput, match=r"x\.txt, line 2: "):
        parse_requirements("six\n-e \\\n ./here\n", "x.txt")


def test_there_is_a_limit_to_what_an_image_may_ask_for() -> None:
    with pytest.raises(InvalidInput, match="more than"):
        check_requirements(f"package{number}" for number in range(MAX_REQUIREMENTS + 1))
    with pytest.raises(InvalidInput, match="larger than"):
        parse_requirements("#" * (1 << 20) + "\n", "x.txt")
