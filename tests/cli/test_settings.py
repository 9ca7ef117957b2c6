"""A settings file is understood whole or refused with the place and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stemkv.cli.settings import PublicPrefix, Settings, read_settings
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text(encoding="utf-8")

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "stemkv.toml"
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(data)
        return path

    return write


def refusal(path: Path) -> str:
    """Return what is said about a file, without the name it must begin with."""
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# What the documented file means


def documented_settings(write: Write) -> Settings:
    found = re.search(r"^```toml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    assert found is not None
    return read_settings(write(found[1]))


def test_the_documented_file_says_what_its_comments_say(write: Write) -> None:
    settings = documented_settings(write)

    assert settings.sharing == SharingPolicy(
        groups={"research": frozenset({"ann", "bob"})},
        tenants={"carol": Sharing.NONE},
        classes={
            "confidential": Sharing.NONE,
            "drafts": Sharing.PRIVATE,
            "chat": Sharing.GROUP,
        },
    )
    assert settings.public == (
        PublicPrefix(name="system prompt", text="You are a helpful assistant."),
        PublicPrefix(
            name="tools",
            messages=({"role": "system", "content": "You may call get_weather."},),
        ),
    )


def test_the_documented_table_of_who_hits_whose_prefix_is_true(write: Write) -> None:
    policy = documented_settings(write).sharing
    table = re.search(r"^\| KV of .*?\n\n", PAGE, flags=re.M | re.S)
    assert table is not None
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table[0].strip().splitlines()
    ]
    (_, *askers), _, *body = rows

    assert askers == ["ann", "bob", "carol", "dave"]
    assert [row[0] for row in body] == [*askers, "a public prefix"]
    for owner, *cells in body:
        for asker, cell in zip(askers, cells, strict=True):
            domain = policy.domain(asker)
            if owner != "a public prefix" and domain != policy.domain(owner):
                domain = None
            assert cell == ("–" if domain is None else "hit"), (owner, asker)


@pytest.mark.parametrize("content", ["", "# nothing\n", "[sharing]\n", "public = []\n"])
def test_what_is_left_out_shares_nothing_between_tenants(
    write: Write, content: str
) -> None:
    assert read_settings(write(content)) == Settings()
    assert Settings() == Settings(sharing=SharingPolicy(), public=())


def test_by_default_none_means_strangers_share_with_nobody(write: Write) -> None:
    path = write('[sharing]\ndefault = "none"\ntenants = {ann = "private"}\n')

    sharing = read_settings(path).sharing

    assert sharing.domain("dave") is None
    assert sharing.domain("ann") == Domain.private("ann")


def test_names_that_need_quotes_are_taken_letter_by_letter(write: Write) -> None:
    path = write('[sharing.groups]\n"a.b c" = ["public", "group:x", "n\\u0000l\\n"]\n')

    groups = read_settings(path).sharing.groups

    assert groups == {"a.b c": {"public", "group:x", "n\0l\n"}}


# Public prefixes in files


def test_files_are_looked_for_beside_the_settings_and_taken_as_they_are(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "system.txt").write_bytes("Grüße,\r\nWelt\n".encode())
    (tmp_path / "tokens.json").write_text("[0, 7, 2147483647]")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write(
        '[[public]]\nname = "a"\ntext_file = "prompts/system.txt"\n'
        '[[public]]\nname = "b"\ntokens_file = "tokens.json"\n'
        f'[[public]]\nname = "c"\ntokens_file = {json.dumps(str(tmp_path / "tokens.json"))}\n'
    )

    text, tokens, by_absolute_path = read_settings(path).public

    assert text == PublicPrefix(name="a", text="Grüße,\r\nWelt\n")
    expected = TokenIds.from_ids([0, 7, 2**31 - 1])
    assert tokens == PublicPrefix(name="b", token_ids=expected)
    assert by_absolute_path.token_ids == expected


def test_the_byte_order_mark_of_an_editor_is_no_part_of_any_file(
    write: Write, tmp_path: Path
) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"text")
    (tmp_path / "b.json").write_bytes(mark + b"[1]")
    path = write(
        mark + b'[[public]]\nname = "a"\ntext_file = "a.txt"\n'
        b'[[public]]\nname = "b"\ntokens_file = "b.json"\n'
    )

    text, tokens = read_settings(path).public

    assert text.text == "text"
    assert tokens.token_ids == TokenIds.from_ids([1])


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("", "the file is empty"),
        ("[]", "holds no token ids"),
        ("[1, 2", "not valid JSON: .*line 1 column"),
        ('{"ids": [1]}', "must hold a JSON array of token ids, got a table"),
        ("7", "must hold a JSON array of token ids, got an integer"),
        ("null", "must hold a JSON array of token ids, got null"),
        ("[1, 2, -3]", "token id at position 2 must be at least 0, got -3"),
        ("[1, 2.0]", "token id at position 1 must be an integer, got a number"),
        ("[NaN]", "token id at position 0 must be an integer, got a number"),
        ("[true]", "token id at position 0 must be an integer, got a boolean"),
        ("[1, null]", "token id at position 1 must be an integer, got null"),
        ('["1"]', "token id at position 0 must be an integer, got text"),
        ("[[1]]", "token id at position 0 must be an integer, got an array"),
        ("[1, 2147483648]", "token id 2147483648 at position 1 is outside"),
        ("[" + "9" * 5000 + "]", "not valid JSON: "),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_bad_tokens_file_is_refused_with_its_name_and_the_position(
    write: Write, tmp_path: Path, content: str, sentence: str
) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(content)
    path = write('[[public]]\nname = "a"\ntokens_file = "tokens.json"\n')

    where = re.escape(f"public[0].tokens_file: {file}: ")
    assert re.match(where + sentence, refusal(path))


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("missing.txt", "the file does not exist"),
        ("folder", "is a folder, not a file"),
        ("empty.txt", "the file is empty"),
        ("latin.txt", "not UTF-8: byte 0xfc in line 2; save the file as UTF-8"),
        ("\\u0000", "cannot be read: "),
        ("x" * 5000, "cannot be read: File name too long"),
        ("empty.txt/a.txt", "cannot be read: Not a directory"),
    ],
    ids=lambda value: repr(value[:20]),
)
@pytest.mark.parametrize("key", ["text_file", "tokens_file"])
def test_a_named_file_that_cannot_be_read_is_refused_with_the_key_that_names_it(
    write: Write, tmp_path: Path, key: str, name: str, sentence: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("1\nGrüße".encode("latin-1"))
    path = write(f'[[public]]\nname = "a"\n{key} = "{name}"\n')

    message = refusal(path)

    assert message.startswith(f"public[0].{key}: {tmp_path}")
    assert sentence in message


# Files that are none


def test_a_settings_file_that_does_not_exist_is_said_to(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing.toml") == "the file does not exist"


def test_a_folder_is_no_settings_file(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "is a folder, not a file"


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"[sharing]\n# caf\xe9\n", "not UTF-8: byte 0xe9 in line 2"),
        (b"\xff\xfe[\0", "not UTF-8: byte 0xff in line 1"),
        (b"[sharing]\ndefault private\n", "not valid TOML: .*line 2, column"),
        (b"[sharing]\n[sharing]\n", "not valid TOML: .*line 2"),
        (b'[sharing]\ndefault = "none"\ndefault = "none"\n', "not valid TOML: .*line"),
        (b"\0", "not valid TOML: .*line 1"),
        (b"x = " + b"9" * 5000, "not valid TOML: "),
        (b"x = " + b"[" * 100_000, "not valid TOML: nested too deeply"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_what_is_no_toml_is_refused_with_the_line(
    write: Write, content: bytes, sentence: str
) -> None:
    assert re.match(sentence, refusal(write(content)))


# Settings that mean nothing


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("sharin = 1", "sharin is not a setting; did you mean sharing? allowed: shar"),
        ("zzz = 1", "zzz is not a setting; allowed: sharing, public"),
        ("[Sharing]", "Sharing is not a setting; did you mean sharing?"),
        (
            '[sharing]\ndefualt = "none"',
            "sharing.defualt is not a setting; did you mean default? "
            "allowed: default, groups, tenants, classes",
        ),
        ('[sharing.group]\na = ["x"]', "sharing.group is not a setting; did you mean"),
        ('["a b"]', '"a b" is not a setting'),
        (
            '[[public]]\nname = "a"\ntextfile = "x"',
            "public[0].textfile is not a setting; did you mean text_file?",
        ),
        (
            '[[public]]\nname = "a"\ntext = "x"\nadapters = ["b"]',
            "public[0].adapters is not a setting; allowed: name, text, ",
        ),
        (
            '[[public]]\nname = "a"\n'
            'messages = [{role = "user", content = "x", nane = "y"}]',
            "public[0].messages[0].nane is not a setting; allowed: role, content",
        ),
    ],
)
def test_a_key_that_is_no_setting_is_refused_with_the_nearest_one(
    write: Write, content: str, sentence: str
) -> None:
    assert refusal(write(content)).startswith(sentence)


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("sharing = 1", "sharing must be a table, got an integer"),
        ("[[sharing]]", "sharing must be a table, got an array"),
        (
            '[sharing]\ndefault = "nome"',
            """sharing.default must be "private" or "none", got 'nome'""",
        ),
        (
            '[sharing]\ndefault = "group"',
            """sharing.default must be "private" or "none", got 'group'""",
        ),
        (
            "[sharing]\ndefault = false",
            'sharing.default must be "private" or "none", got a boolean',
        ),
        ("[sharing]\ngroups = []", "sharing.groups must be a table, got an array"),
        (
            '[sharing.groups]\nresearch = "ann"',
            "sharing.groups.research must be an array, got text",
        ),
        (
            '[sharing.groups.research]\nann = "bob"',
            "sharing.groups.research must be an array, got a table",
        ),
        (
            '[sharing.groups]\n"a.b" = ["ann", 1979-05-27]',
            'sharing.groups."a.b"[1] must be text, got a date',
        ),
        (
            '[sharing.groups]\na = ["ann"]\nb = ["bob", "ann"]',
            "sharing.groups: tenant 'ann' is in 'a' and 'b'; a request has one domain",
        ),
        ("[sharing.groups]\na = []", "sharing.groups: group 'a' has no members"),
        (
            '[sharing.groups]\na = [""]',
            "sharing.groups: a tenant in group 'a' must not be empty",
        ),
        (
            '[sharing.groups]\n"" = ["ann"]',
            "sharing.groups: the name of a group must not be empty",
        ),
        (
            '[sharing.groups]\na = ["ann"]\n[sharing.tenants]\nann = "none"',
            "sharing.tenants: 'ann' is 'none' here and a member of group 'a'",
        ),
        (
            '[sharing.tenants]\ncarol = "no"',
            """sharing.tenants.carol must be "private" or "none", got 'no'""",
        ),
        (
            "[sharing.tenants]\ncarol.smith = 1",
            'sharing.tenants.carol must be "private" or "none", got a table',
        ),
        (
            "[sharing.classes]\nchat = 1.5",
            'sharing.classes.chat must be "group" or "private" or "none", got a number',
        ),
        ("public = 1", "public must be an array, got an integer"),
        (
            '[public]\nname = "a"',
            "public must be an array of tables; write [[public]]",
        ),
        ('public = ["a"]', "public[0] must be a table, got text"),
        ('[[public]]\ntext = "x"', "public[0].name is missing"),
        ('[[public]]\nname = ""\ntext = "x"', "public[0].name must not be empty"),
        ('[[public]]\nname = 1\ntext = "x"', "public[0].name must be text, got an in"),
        (
            '[[public]]\nname = "a"',
            "public[0] ('a') needs exactly one of text, text_file, messages, "
            "tokens_file; got none",
        ),
        (
            '[[public]]\nname = "a"\ntext = "x"\ntokens_file = "y"',
            "public[0] ('a') needs exactly one of text, text_file, messages, "
            "tokens_file; got text and tokens_file",
        ),
        ('[[public]]\nname = "a"\ntext = ""', "public[0].text must not be empty"),
        ('[[public]]\nname = "a"\ntext = 1', "public[0].text must be text, got an int"),
        (
            '[[public]]\nname = "a"\ntext_file = ["x"]',
            "public[0].text_file must be text, got an array",
        ),
        (
            '[[public]]\nname = "a"\nmessages = "x"',
            "public[0].messages must be an array, got text",
        ),
        (
            '[[public]]\nname = "a"\nmessages = []',
            "public[0].messages must not be empty",
        ),
        (
            '[[public]]\nname = "a"\nmessages = ["x"]',
            "public[0].messages[0] must be a table, got text",
        ),
        (
            '[[public]]\nname = "a"\nmessages = [{role = "user"}]',
            "public[0].messages[0].content is missing",
        ),
        (
            '[[public]]\nname = "a"\nmessages = [{content = "x"}]',
            "public[0].messages[0].role is missing",
        ),
        (
            '[[public]]\nname = "a"\nmessages = [{role = "", content = "x"}]',
            "public[0].messages[0].role must not be empty",
        ),
        (
            '[[public]]\nname = "a"\nmessages = [{role = "user", content = ["x"]}]',
            "public[0].messages[0].content must be text, got an array",
        ),
        (
            '[[public]]\nname = "a"\ntext = "x"\n[[public]]\nname = "b"\ntext = "x"\n'
            '[[public]]\nname = "a"\ntext = "y"',
            "public[2].name: 'a' is the name of public[0] already",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_its_key_and_what_is(
    write: Write, content: str, sentence: str
) -> None:
    assert refusal(write(content)).startswith(sentence)


def test_a_public_prefix_made_in_python_says_exactly_one_thing() -> None:
    tokens = TokenIds.from_ids([1])

    with pytest.raises(ConfigError, match="exactly one of .*; got none"):
        PublicPrefix(name="a")
    with pytest.raises(ConfigError, match="exactly one of .*; got text and token_ids"):
        PublicPrefix(name="a", text="x", token_ids=tokens)
    with pytest.raises(ConfigError, match="token_ids must not be empty"):
        PublicPrefix(name="a", token_ids=TokenIds.from_ids([]))
    with pytest.raises(ConfigError, match="name must not be empty"):
        PublicPrefix(name="", text="x")
    with pytest.raises(ConfigError, match=r"public\[1\].name: 'a' is the name of"):
        Settings(public=(PublicPrefix(name="a", text="x"),) * 2)
