"""On-policy data: the model answers every turn of the prompts itself, and its own tokens are what is learnt.

Turns are answered one after the other, all dialogues side by side: the second turn's prompt holds the model's own first
answer. Each turn has a file beside the output, in the format of `dspark generate`, so that a killed job has lost what
was running and nothing else. The output is made of them at the end, in the order of the prompts, and so has the same
bytes however often the job was killed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_jax import chat
from dspark_jax.data.files import replace
from dspark_jax.data.turns import Turn, join
from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.request import SEEDS
from dspark_jax.errors import DsparkError, NotFiniteError, RequestError
from dspark_jax.jobs.json_lines import parse_object, read_lines, to_line
from dspark_jax.jobs.prompts import Job, Key, PromptReader, read_rows
from dspark_jax.jobs.results import Results

Complete = Callable[[Sequence[Job], int, int], Iterator[tuple[int, Completion]]]
"""Completes jobs, in any order, given how many of the turn's jobs are done already, and the number of the turn."""


@dataclass
class Dialogue:
    """One sample of a row on its way.

    Attributes:
        key: the row's id and the number of the sample.
        row: as in the file, with a seed; of a dialogue the first question.
        questions: for each answer that the model is asked for, the messages in front of it, behind the answer before;
            a single None where the row is a plain prompt.
        answers: records of `dspark generate`, of the turns that are done.
    """

    key: Key
    row: dict[str, Any]
    questions: Sequence[Sequence[chat.Message] | None]
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def unfinished(self) -> bool:
        """Whether a question is left; in the end, since no dialogue goes on after what the model answered."""
        return len(self.answers) < len(self.questions)

    @property
    def messages(self) -> list[chat.Message]:
        """The dialogue with the answers that are there, and the question that is next."""
        said: list[chat.Message] = []
        for turn, question in enumerate(self.questions[: len(self.answers) + 1]):
            said += question or ()
            said += [answer["message"] for answer in self.answers[turn : turn + 1]]
        return said

    def job(self, reader: PromptReader) -> Job | None:
        """The next answer to ask for; None if there is no other, or the dialogue cannot go on after the last one."""
        if not self.unfinished:
            return None
        plain = self.questions[0] is None
        name, sample = self.key
        try:
            return reader.jobs_of(name, self.row if plain else self.row | {"messages": self.messages})[sample]
        except DsparkError:  # the model's own answer is one after which no dialogue goes on
            assert self.answers, "the first question was checked when it was read"
            return None

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of the output, one a document."""
        name, sample = self.key
        told = {"dialogue": self.messages} if "message" in self.answers[0] else {"completion": self.answers[0]["text"]}
        for document in join(Turn(answer["prompt_ids"], answer["tokens"]) for answer in self.answers):
            yield {
                "id": name,
                "sample": sample,
                "ids": document.ids.tolist(),
                "loss_mask": document.supervised.astype(int).tolist(),
                **told,
                "finish_reasons": [answer["finish_reason"] for answer in self.answers],
                "settings": self.answers[0]["settings"],
            }


def read_dialogues(path: Path, reader: PromptReader) -> list[Dialogue]:
    """What a file of prompts asks for, checked.

    A row is one of `PromptReader`'s, or a dialogue with the answers of somebody else, which are left out. Behind the
    first tool result nothing is asked for, since it answers a call that the model may not make. Rows without a seed of
    their own count theirs up from the reader's.

    Raises:
        RequestError: the file cannot be read, or a line of it cannot be; the message names it.
    """
    dialogues = []
    for number, (where, row) in enumerate(read_rows(path)):
        row = {"seed": (reader.settings["seed"] + number) % SEEDS} | row
        questions: Sequence[Sequence[chat.Message] | None] = [None]
        try:
            if "messages" in row:
                questions = questions_of(chat.messages_of(row, "the dialogue"))
                row = {name: value for name, value in row.items() if name != "tools"} | {"messages": questions[0]}
            jobs = reader.jobs_of(row["id"], row)
        except DsparkError as error:
            raise RequestError(f"{where}: {error}") from error
        dialogues += [Dialogue(job.key, row, questions) for job in jobs]
    if not dialogues:
        raise RequestError(f'{path}: holds no prompt; expected JSON lines like {{"id": 1, "prompt": "Hello"}}.')
    return dialogues


def questions_of(messages: Sequence[chat.Message]) -> list[list[chat.Message]]:
    """What stands in front of each answer of the assistant, up to the first tool result, and behind the last answer."""
    questions: list[list[chat.Message]] = [[]]
    for message in messages:
        if message.get("role") == "tool":
            break
        if message.get("role") == "assistant":
            questions.append([])
        else:
            questions[-1].append(message)
    else:
        if questions[-1]:
            return questions
    return questions[:-1] or [[]]


def answer(
    dialogues: Sequence[Dialogue], reader: PromptReader, folder: Path, common: dict[str, Any], complete: Complete
) -> int:
    """Answers every turn of every dialogue that has no answer in the folder.

    Args:
        dialogues: of `read_dialogues`; their answers are filled in.
        reader: the one they were read with.
        folder: for a file a turn; made if it is not there.
        common: settings that all answers share, see `Results`.
        complete: runs the model; called once for each turn that lacks answers.

    Returns:
        How many answers are new.

    Raises:
        RequestError: the folder holds answers of another job.
        NotFiniteError: the target's logits were not finite in some answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    turn = new = 0
    while asked := [(dialogue, job) for dialogue in dialogues if (job := dialogue.job(reader)) is not None]:
        jobs = [job for _, job in asked]
        path = folder / f"turn-{turn}.jsonl"
        with Results(path, common) as results:
            missing = results.missing(jobs)
            for number, completion in complete(missing, len(jobs) - len(missing), turn) if missing else ():
                results.append(missing[number], completion, reader.text)
                new += 1
        turn, records = turn + 1, dict(_records(path))
        for dialogue, job in asked:
            dialogue.answers.append(records[job.key])
        broken = [key for key, record in records.items() if record["finish_reason"] == "not_finite"]
        if broken:
            raise NotFiniteError(
                f"{path}: the target's logits were not finite in {len(broken)} answers, first in that of id "
                f"{broken[0][0]!r}; check its weights, and delete {folder}."
            )
    return new


def _records(path: Path) -> Iterator[tuple[Key, dict[str, Any]]]:
    for number, line in read_lines(path):
        record = parse_object(line, f"{path} line {number}")
        yield (record["id"], record["sample"]), record


def write_lines(dialogues: Iterable[Dialogue], out: Path) -> None:
    """Writes the output of answered dialogues, whole or not at all."""
    replace(out, ((to_line(line) + "\n").encode() for dialogue in dialogues for line in dialogue.lines()))
