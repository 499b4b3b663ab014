"""Messages as callers have them, checked and put into one form.

OpenAI's form, and what DeepSeek's encoding file adds to it:

- roles `system`, `user`, `assistant`, `tool`, and DeepSeek's own `latest_reminder` and `developer`;
- `content`: text, or a list of parts, whose texts are joined by an empty line;
- system and developer: `tools` (`{"type": "function", "function": {...}}`), `response_format`;
- assistant: `reasoning_content`, `tool_calls`, and `prefix` or `wo_eos`, true on a last message to be continued;
- tool: `tool_call_id`;
- `task`: a classification that the model answers next, with its own token instead of the generation prompt.

Other fields are left alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_jax.errors import RequestError

Message = dict[str, Any]

ROLES = ("system", "latest_reminder", "user", "developer", "assistant", "tool")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")

# Fields that mean something on these roles only.
CARRIERS: dict[str, tuple[str, ...]] = {
    "tools": ("system", "developer"),
    "response_format": ("system", "developer"),
    "reasoning_content": ("assistant",),
    "tool_calls": ("assistant",),
    "prefix": ("assistant",),
    "wo_eos": ("assistant",),
    "tool_call_id": ("tool",),
    "task": ("user", "developer", "assistant"),
}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: a JSON object as text; from a model it is what the model wrote, which may be none.
        id: by which a tool message refers to the call.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """A checked message. `tools` are the function objects; `unfinished` marks an answer that is to be continued."""

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    response_format: dict[str, Any] | None = None
    task: str | None = None
    unfinished: bool = False

    @property
    def finished(self) -> bool:
        """An assistant's whole answer."""
        return self.role == "assistant" and not self.unfinished


def read_messages(path: Path) -> list[Message]:
    """Messages of a JSON file: a list of them, or an object with `messages` and, if it has any, `tools`.

    Raises:
        RequestError: no such file, or it holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); expected a JSON file of messages.") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: is not JSON ({error}); expected a list of messages.") from error
    return messages_of(document, str(path))


def messages_of(document: object, where: str) -> list[Message]:
    """Messages of a parsed document, such as a row of a JSONL file; its `tools` join the system message.

    Raises:
        RequestError: it holds something else; `where` names it.
    """
    messages, tools = document, ()
    if isinstance(document, dict):
        messages, tools = document.get("messages"), document.get("tools") or ()
    if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise RequestError(
            f'{where}: holds no messages; expected a list such as [{{"role": "user", "content": "Hello"}}], or an '
            'object with such a list as "messages".'
        )
    try:
        return with_tools(messages, tools)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error


def with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages, with these tools declared by the system message at the front, which is made if there is none."""
    if not isinstance(messages, Sequence):
        raise RequestError(f"messages is {messages!r}; expected a list of messages.")
    if not tools:
        return list(messages)
    match messages:
        case [{"role": "system", "tools": [_, *_]}, *_]:
            raise RequestError(
                "message 0 (system): has tools, and tools are given beside the messages; give them once."
            )
        case [{"role": "system"} as system, *others]:
            return [system | {"tools": tools}, *others]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


def read_turn(message: Message, index: int) -> Turn:
    """A checked message.

    Raises:
        RequestError: what is wrong, and in which field.
    """
    if not isinstance(message, dict):
        raise RequestError(f'message {index}: is {message!r}; expected such as {{"role": "user", "content": "Hello"}}.')
    role = message.get("role")
    where = name_of(role, index)
    if role not in ROLES:
        raise RequestError(f"message {index}: has the role {role!r}; expected one of {', '.join(ROLES)}.")
    try:
        to_json(message).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{where}: is not JSON in Unicode ({error}); expected text, numbers, lists, objects."
        ) from error
    for field in message:
        if message[field] and field in CARRIERS and role not in CARRIERS[field]:
            raise RequestError(f"{where}: has {field}, which belongs to {' or '.join(CARRIERS[field])}; move it there.")
    turn = Turn(
        role=role,
        content=_content(message, role, where),
        reasoning_content=_optional_text(message, "reasoning_content", where) or "",
        tool_calls=tuple(_call(call, where) for call in _list(message, "tool_calls", where)),
        tool_call_id=_optional_text(message, "tool_call_id", where),
        tools=tuple(_function(tool, "tools", where) for tool in _list(message, "tools", where)),
        response_format=_response_format(message, where),
        task=_optional_text(message, "task", where),
        unfinished=bool(message.get("prefix") or message.get("wo_eos")),
    )
    if turn.task is not None and turn.task not in TASKS:
        raise RequestError(f"{where}: has the task {turn.task!r}; expected one of {', '.join(TASKS)}.")
    return turn


def _content(message: Message, role: str, where: str) -> str:
    content = message.get("content")
    if content is None and role in ("system", "assistant"):
        return ""
    if isinstance(content, list):
        content = "\n\n".join(_part(part, role, where) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{where}: content is {content!r}; expected text, or a list of parts with text.")
    if role == "developer" and not content:
        raise RequestError(f"{where}: content is empty; write the developer's text.")
    return content


def _part(part: object, role: str, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if role == "tool" and isinstance(kind, str) and kind != "text":
        return f"[Unsupported {kind}]"
    raise RequestError(
        f'{where}: has the part {part!r}; the model reads text only, expected {{"type": "text", "text": "..."}}.'
    )


def _optional_text(message: Message, field: str, where: str) -> str | None:
    value = message.get(field)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{where}: {field} is {value!r}; expected text.")
    return value


def _list(message: Message, field: str, where: str) -> Sequence[Any]:
    value = message.get(field) or ()
    if not isinstance(value, list | tuple):
        raise RequestError(f"{where}: {field} is {value!r}; expected a list.")
    return value


def _response_format(message: Message, where: str) -> dict[str, Any] | None:
    value = message.get("response_format")
    if value is not None and not isinstance(value, dict):
        raise RequestError(
            f'{where}: response_format is {value!r}; expected an object such as {{"type": "json_object"}}.'
        )
    return value


def _function(wrapped: object, field: str, where: str) -> dict[str, Any]:
    function = wrapped.get("function") if isinstance(wrapped, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
        raise RequestError(
            f'{where}: {field} holds {wrapped!r}; expected {{"type": "function", "function": {{"name": "...", ...}}}}.'
        )
    return function


def _call(call: object, where: str) -> ToolCall:
    function = _function(call, "tool_calls", where)
    assert isinstance(call, dict)  # or it would hold no function
    return ToolCall(function["name"], _arguments(function, where), _optional_text(call, "id", where) or "")


def _arguments(function: dict[str, Any], where: str) -> str:
    """An object's JSON, or the caller's text: what is no JSON stays what the model wrote."""
    arguments = function.get("arguments")
    text = to_json(arguments) if isinstance(arguments, dict) else arguments
    call = f"{where}: the call of {function['name']}"
    if not isinstance(text, str):
        raise RequestError(f"{call} has the arguments {arguments!r}; expected an object, or its JSON as text.")
    try:
        parsed = json.loads(text)
        to_json(parsed).encode("utf-8")
    except json.JSONDecodeError:
        return text
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{call} has arguments that are not Unicode ({error}); write the characters whole."
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{call} has arguments that cannot be read ({error}); write shorter numbers and lists."
        ) from error
    if not isinstance(parsed, dict):
        raise RequestError(f"{call} has the arguments {text}; expected a JSON object, one key for each argument.")
    return text


def name_of(role: object, index: int) -> str:
    """How errors call a message."""
    return f"message {index} ({role})"


def to_json(value: object) -> str:
    """JSON as DeepSeek's prompts have it: one space after separators, nothing escaped that need not be."""
    return json.dumps(value, ensure_ascii=False)
