"""Which message may stand where.

DeepSeek's implementations agree on dialogues whose order of roles is in `BEFORE`. Where they differ, the model has seen
one form at most, so such a dialogue is refused rather than rendered in a form of our choice.
"""

from collections.abc import Sequence

from dspark_jax.chat.messages import Message, Turn, name_of, read_turn
from dspark_jax.errors import RequestError

# Roles that may stand directly before a role; None is the start.
BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "latest_reminder": (None, "system", "assistant"),
    "user": (None, "system", "latest_reminder", "user", "tool", "assistant"),
    "developer": (None, "system", "latest_reminder", "assistant"),
    "assistant": ("user", "developer", "tool"),
    "tool": ("assistant", "tool"),
}


def read_turns(messages: Sequence[Message]) -> list[Turn]:
    """Checked turns, at least one of them a user's, of which the last can be answered, is an answer or has a task.

    Raises:
        RequestError: what is wrong, and in which message.
    """
    turns = [read_turn(message, index) for index, message in enumerate(messages)]
    if not any(turn.role in ("user", "developer") for turn in turns):
        raise RequestError(f"there is no user message among {len(turns)}; add one for the model to answer.")
    for index, turn in enumerate(turns):
        _check_place(turns, index, name_of(turn.role, index))
    return turns


def _check_place(turns: Sequence[Turn], index: int, where: str) -> None:
    """Refuses a turn that stands where the model never saw one."""
    turn, last = turns[index], index == len(turns) - 1
    before = turns[index - 1] if index else None
    answers_task = before is not None and before.task is not None and turn.role == "assistant"
    if answers_task:
        if not last or turn.task or turn.unfinished or turn.tool_calls:
            raise RequestError(f"{where}: answers a task; expected a plain answer, as the last message.")
    elif (before and before.role) not in BEFORE[turn.role]:
        place = f"comes after message {index - 1} ({before.role})" if before else "is the first message"
        expected = ", ".join(role or "the start" for role in BEFORE[turn.role])
        raise RequestError(
            f"{where}: {place}, where DeepSeek's implementations differ or fail; expected before it: {expected}. "
            "Move it, or join it with its neighbour."
        )
    if last and turn.role in ("system", "latest_reminder"):
        raise RequestError(f"{where}: is the last message, and nothing to answer; put a user message after it.")
    if turn.unfinished and (not last or turn.task or turn.tool_calls):
        raise RequestError(
            f"{where}: is to be continued, which only the last message can be, without tool_calls or task."
        )
    if turn.role == "user" and not turn.content:
        _check_alone(turns, index, where)
    if turn.task:
        _check_task(turns, index, where)
    if turn.role == "tool":
        _check_result(turns, index, where)


def _check_alone(turns: Sequence[Turn], index: int, where: str) -> None:
    """An empty text joined with others is an empty line to one implementation and nothing to another."""
    neighbours = [*turns[max(index - 1, 0) : index], *turns[index + 1 : index + 2]]
    if any(turn.role in ("user", "tool") for turn in neighbours):
        raise RequestError(f"{where}: is empty, beside a message with which it is joined; leave it out.")


def _check_task(turns: Sequence[Turn], index: int, where: str) -> None:
    turn = turns[index]
    if [following.role for following in turns[index + 1 :]] not in ([], ["assistant"]):
        raise RequestError(f"{where}: has a task; expected on the last message, or with its answer as the last one.")
    if turn.role == "assistant" and turn.task == "action":
        raise RequestError(f"{where}: has the task action, which belongs to a user message; move it there.")
    if turn.role == "user" and index and turns[index - 1].role in ("user", "tool"):
        raise RequestError(
            f"{where}: has a task and follows a turn with which it is joined; put an answer between them."
        )


def _check_result(turns: Sequence[Turn], index: int, where: str) -> None:
    caller = max(i for i in range(index) if turns[i].role == "assistant")
    calls = turns[caller].tool_calls
    if not calls:
        raise RequestError(f"{where}: follows {name_of('assistant', caller)}, which has no tool_calls; add the call.")
    ids = [call.id for call in calls if call.id]
    id = turns[index].tool_call_id
    if id and ids and id not in ids:
        raise RequestError(f"{where}: tool_call_id is {id!r}; expected an id of message {caller}: {', '.join(ids)}.")
