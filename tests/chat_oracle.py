"""DeepSeek-V4's chat format a second time, from its description and not from any package: messages to text, by hand.

For dialogues that every implementation renders alike, without developer messages and tasks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
DSML = "｜DSML｜"


@dataclass(frozen=True)
class Texts:
    """The fixed texts, which golden records hold."""

    before_tools: str
    after_tools: str
    before_format: str


def oracle(
    messages: Sequence[Message], *, thinking: bool, effort: str, drop_thinking: bool, generation: bool, texts: Texts
) -> str:
    keep = not drop_thinking or any(message.get("tools") for message in messages)
    last_user = max(i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
    text = BOS + (effort if thinking else "")
    for i, message in enumerate(messages):
        thinks = thinking and (keep or i > last_user)
        match message["role"]:
            case "system":
                text += message["content"] + blocks(message, texts)
            case "latest_reminder":
                text += REMINDER + message["content"]
            case "assistant":
                text += ASSISTANT + ("<think>" if thinks else "</think>")
                text += f"{message.get('reasoning_content', '')}</think>" if thinks else ""
                text += message["content"] + calls(message) + ("" if message.get("prefix") else EOS)
            case _ if messages[i - 1]["role"] not in ("user", "tool") or not i:
                text += USER + "\n\n".join(user_blocks(messages, i))
    if generation and messages[-1]["role"] != "assistant":
        text += ASSISTANT + ("<think>" if thinking else "</think>")
    return text


def user_blocks(messages: Sequence[Message], start: int) -> list[str]:
    """User and tool messages from `start` on make one turn; results take the order of the calls."""
    run = []
    for message in messages[start:]:
        if message["role"] not in ("user", "tool"):
            break
        run.append(message)
    order = [call["id"] for call in messages[start - 1].get("tool_calls", ())] if start else []
    results = sorted((m for m in run if m["role"] == "tool"), key=lambda m: order.index(m["tool_call_id"]))
    return [f"<tool_result>{m['content']}</tool_result>" for m in results] + [
        m["content"] for m in run if m["role"] == "user"
    ]


def blocks(message: Message, texts: Texts) -> str:
    text = ""
    if message.get("tools"):
        schemas = "\n".join(dumps(tool["function"]) for tool in message["tools"])
        text += f"\n\n{texts.before_tools}{schemas}{texts.after_tools}"
    if message.get("response_format"):
        text += f"\n\n{texts.before_format}{dumps(message['response_format'])}"
    return text


def calls(message: Message) -> str:
    if not message.get("tool_calls"):
        return ""
    invokes = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        parameters = [
            f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else dumps(value)}</{DSML}parameter>"
            for name, value in (json.loads(arguments) if isinstance(arguments, str) else arguments).items()
        ]
        body = "\n".join(parameters)
        invokes.append(f'<{DSML}invoke name="{call["function"]["name"]}">\n{body}\n</{DSML}invoke>')
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(invokes) + f"\n</{DSML}tool_calls>"


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
