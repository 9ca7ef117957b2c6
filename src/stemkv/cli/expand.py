"""Options of a command from the fields of dataclasses.

Owns the way from a field to an option: its name, type, default and help are the field's.
A parameter of a command that is a dataclass becomes an option for each of its fields that
has a help text, and the command gets the dataclass; one that is a `CoreConfig` becomes an
option for each entry of `KNOBS`. What groups have in common, such as a seed, is one option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import typer

from stemkv.cli.knobs import KNOBS, Knob
from stemkv.cli.options import errors_explained
from stemkv.cli.pairs import pairs_listed
from stemkv.core.core import CoreConfig
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.sim.presets import LARGE

__all__ = ["argument", "expanded", "option"]


def option(default: Any, says: str, *names: str) -> Any:
    """Return a field that is an option."""
    return field(default=default, metadata={"typer": typer.Option(*names, help=says)})


def argument(default: Any, says: str) -> Any:
    """Return a field that is an argument."""
    return field(default=default, metadata={"typer": typer.Argument(help=says)})


def expanded(
    extras: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what turns a command with dataclasses into one that typer understands.

    Errors are explained, as by `errors_explained`, from the first option on.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        found: dict[str, Parameter] = {}
        for name, parameter in signature(command).parameters.items():
            hint = hints[name]
            each = parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY)
            for one in _options_of(hint) if _is_group(hint) else (each,):
                found.setdefault(one.name, one)

        def run(**typed: Any) -> None:
            with errors_explained(extras):
                given = {
                    name: _made(hint, typed) if _is_group(hint) else typed[name]
                    for name, hint in hints.items()
                    if name != "return"
                }
                command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = Signature(list(found.values()))  # type: ignore[attr-defined]
        return run

    return wrap


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _options_of(kind: Any) -> Iterator[Parameter]:
    if kind is CoreConfig:
        for knob in KNOBS:
            found, hint = _field_of(knob)
            says = str(found.metadata["help"])
            default = _default(knob)
            if isinstance(default, Mapping):
                hint, default = str | None, None
            yield _parameter(
                knob.parameter,
                hint,
                default,
                typer.Option(knob.option, help=f"{knob.unit} {says}".strip()),
            )
        return
    hints = get_type_hints(kind)
    for each in fields(kind):
        info = each.metadata.get("typer")
        if info is not None:
            hint = hints[each.name]
            default = each.default
            if get_origin(hint) is Sequence:
                hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
            yield _parameter(each.name, hint, default, info)


def _parameter(name: str, hint: Any, default: Any, info: Any) -> Parameter:
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, info],
    )


def _made(kind: Any, typed: Mapping[str, Any]) -> Any:
    """Return the dataclass that was typed."""
    if kind is CoreConfig:
        return _core(typed)
    values = {
        each.name: tuple(typed[each.name] or ())
        if isinstance(each.default, tuple)
        else typed[each.name]
        for each in fields(kind)
        if "typer" in each.metadata
    }
    return kind(**values)


def _core(typed: Mapping[str, Any]) -> CoreConfig:
    parts: dict[str, dict[str, Any]] = {}
    for knob in KNOBS:
        value = typed[knob.parameter]
        if isinstance(_default(knob), Mapping):
            value = pairs_listed(knob.option, value)
        elif knob.per != 1.0 and value is not None:
            value = value / knob.per
        parts.setdefault(knob.part, {})[knob.field] = value
    core = LARGE
    for part, values in parts.items():
        config = getattr(core, part)
        if config is None:
            is_said = all(value is not None for value in values.values())
            config = _OPTIONAL[part](**values) if is_said else None
        else:
            config = replace(config, **values)
        core = replace(core, **{part: config})
    return core


def _default(knob: Knob) -> Any:
    config = getattr(LARGE, knob.part)
    return None if config is None else getattr(config, knob.field)


def _field_of(knob: Knob) -> tuple[Field[Any], Any]:
    """Return the field of a knob and the type that is typed for it."""
    config = getattr(LARGE, knob.part)
    kind = _OPTIONAL[knob.part] if config is None else type(config)
    found = next(each for each in fields(kind) if each.name == knob.field)
    hint = get_type_hints(kind)[knob.field]
    return found, hint if config is not None else hint | None


_OPTIONAL: Final[Mapping[str, type]] = {"sessions": SessionConfig}
