"""What people ask: dialogues for the target to write, prompts and replies.

A dialogue's kind follows from its number, everything else from its own random
generator. Passages to summarise, to answer from or to translate are the target's own
words: it is asked for them first.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from edgespec.errors import FormatError, UsageError
from edgespec_export.train.talk import Talk
from edgespec_export.train.writing import Ask, Dialogue, Keep, Reply

Random = np.random.Generator
Turn = Generator[Ask | Keep, Reply | None, Reply]

# Of twenty dialogues so many are of each kind. Without prompts from a file, "file" ones
# are the target's own.
MIX = {
    "file": 6,
    "own": 5,
    "question": 1,
    "explain": 1,
    "write": 1,
    "role": 1,
    "passage": 2,
    "search": 1,
    "code": 1,
    "translate": 1,
}
GREEDY = 0.5  # share of replies at temperature 0
WARM = 0.8  # temperature of the others
_LEAST, _MOST = 12, 1500  # characters of a turn that the target wrote for the user


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line of a prompt file."""

    turns: tuple[str, ...]
    kind: str = "file"


@dataclass(frozen=True)
class Makers:
    """Dialogues by number.

    Args:
        prompts: of a file, may be none.
        limit: most tokens of a reply.
        seed: of the order of the prompts.
    """

    talk: Talk
    prompts: list[Prompt]
    limit: int
    seed: int
    order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shuffled = np.random.default_rng(self.seed).permutation(len(self.prompts))
        object.__setattr__(self, "order", shuffled.tolist())

    def make(self, number: int, random: Random) -> Dialogue:
        """The dialogue of a number."""
        kinds = [kind for kind, count in MIX.items() for _ in range(count)]
        place = number * 7 % len(kinds)  # neighbours are of different kinds
        kind = kinds[place]
        if kind == "file" and self.prompts:
            use = number // len(kinds) * MIX["file"] + kinds[:place].count("file")
            again, index = divmod(use, len(self.prompts))
            prompt = self.prompts[self.order[index]]
            greedy = (again + index) % 2 == 0
            return self.chat(prompt, 0.0 if greedy else WARM)
        maker = {
            "question": self._question,
            "explain": self._explain,
            "write": self._write,
            "role": self._role,
            "passage": self._passage,
            "search": self._search,
            "code": self._code,
            "translate": self._translate,
        }.get(kind, self._own)
        return maker(random)

    def chat(self, prompt: Prompt, temperature: float) -> Dialogue:
        """The user's turns as they are, each with its reply."""
        ids: list[int] | None = self.talk.prompt(prompt.turns[0])
        for number, _ in enumerate(prompt.turns, start=1):
            assert ids is not None
            reply = yield from self._reply(ids, temperature, continues=number > 1)
            ends = reply.is_finished and number < len(prompt.turns)
            more = self.talk.next_turn(prompt.turns[number]) if ends else None
            if more is None:
                break
            ids = ids + reply.tokens + more
        yield Keep(prompt.kind, temperature)

    # ---- kinds ----

    def _own(self, random: Random) -> Dialogue:
        """The target writes both sides, now and then of two questions."""
        temperature = _temperature(random)
        text = yield from self._user(self.talk.opening, random)
        if text is None:
            return
        ids = self.talk.prompt(text)
        reply = yield from self._reply(ids, temperature)
        opening = self.talk.next_turn()
        if reply.is_finished and opening is not None and random.random() < 0.3:
            before = ids + reply.tokens
            second = yield from self._user(before + opening, random)
            more = self.talk.next_turn(second) if second is not None else None
            if more is not None:
                yield from self._reply(before + more, temperature, continues=True)
        yield Keep("own", temperature)

    def _question(self, random: Random) -> Dialogue:
        """Short questions of fact, some of them the target's."""
        topic = _topic(random, "things", "nature", "society")
        if random.random() < 0.5:
            text = _pick(random, _QUESTIONS).format(topic)
        else:
            ask = _pick(random, _ASK_FOR_QUESTION).format(topic)
            text = yield from self._text(ask, random, 48)
            text = text.splitlines()[0].strip(' "') if text else f"What is {topic}?"
        yield from self._kept("question", text, random)

    def _explain(self, random: Random) -> Dialogue:
        topics = [_topic(random, "things", "nature", "society") for _ in range(2)]
        text = _pick(random, _EXPLAIN).format(*topics, life=_topic(random, "life"))
        yield from self._kept("explain", text, random)

    def _write(self, random: Random) -> Dialogue:
        text = _pick(random, _WRITE).format(
            topic=_topic(random, "things", "nature", "society", "life"),
            life=_topic(random, "life"),
            person=_topic(random, "people"),
            n=int(random.integers(3, 9)),
        )
        yield from self._kept("write", text, random)

    def _role(self, random: Random) -> Dialogue:
        text = _pick(random, _ROLE).format(
            person=_topic(random, "people"),
            topic=_topic(random, "things", "nature", "society", "life"),
        )
        yield from self._kept("role", text, random)

    def _passage(self, random: Random) -> Dialogue:
        """A text, and two things done with it."""
        passage = yield from self._article(random, long=random.random() < 0.4)
        for _ in range(2):
            kind = _pick(random, ("summary", "answer", "rewrite", "list"))
            if kind == "answer":
                ask = f"{passage}\n\n{_pick(random, _ASK_ABOUT)}"
                question = yield from self._text(ask, random, 40)
                question = question.splitlines()[0] if question else "What is it about?"
                text = _pick(random, _ANSWER).format(passage=passage, q=question)
            else:
                text = _pick(random, _DO_WITH[kind]).format(passage=passage)
            yield from self._kept(kind, text, random)

    def _search(self, random: Random) -> Dialogue:
        """Several found texts in front of a question."""
        topic = _topic(random, "things", "nature", "society")
        found = []
        for _ in range(int(random.integers(2, 5))):
            ask = _pick(random, _ABOUT).format(topic)
            text = yield from self._text(ask, random, 180)
            found.append(_whole_sentences(text))
        numbered = "\n".join(f"{i}. {text}" for i, text in enumerate(found, start=1))
        question = _pick(random, _QUESTIONS).format(topic)
        text = _pick(random, _SEARCH).format(found=numbered, q=question)
        yield from self._kept("search", text, random)

    def _code(self, random: Random) -> Dialogue:
        """Code, and then something about it."""
        task = _topic(random, "functions")
        language = _pick(random, ("Python", "Python", "Python", "JavaScript", "C"))
        ask = _pick(random, _CODE).format(language, task)
        temperature = _temperature(random)
        reply = yield from self._reply(self.talk.prompt(ask), temperature)
        yield Keep("code", temperature)
        code = _fenced(self.talk.text(reply.tokens))
        text = _pick(random, _ABOUT_CODE).format(code=code, language=language)
        yield from self._kept("code", text, random)

    def _translate(self, random: Random) -> Dialogue:
        if random.random() < 0.5:
            text = _german(random)
            ask = _pick(random, _FROM_GERMAN).format(text)
        else:
            passage = yield from self._article(random, long=False)
            sentences = _sentences(passage)
            at = int(random.integers(0, max(1, len(sentences) - 2)))
            text = " ".join(sentences[at : at + int(random.integers(1, 4))])
            language = _pick(random, ("German", "German", "French", "Spanish"))
            ask = _pick(random, _TO).format(language, text)
        yield from self._kept("translate", ask, random)

    # ---- turns ----

    def _kept(self, kind: str, text: str, random: Random) -> Turn:
        temperature = _temperature(random)
        reply = yield from self._reply(self.talk.prompt(text), temperature)
        yield Keep(kind, temperature)
        return reply

    def _reply(
        self, ids: list[int], temperature: float, *, continues: bool = False
    ) -> Turn:
        reply = yield Ask(
            ids, self.limit, temperature, self.talk.eos, continues=continues
        )
        assert reply is not None
        return reply

    def _text(
        self, ask: str, random: Random, limit: int
    ) -> Generator[Ask | Keep, Reply | None, str]:
        """The target's own words, for use in a prompt."""
        ids = self.talk.prompt(ask)
        warm = float(random.uniform(0.6, 1.0))
        reply = yield Ask(ids, limit, warm, self.talk.eos, is_reply=False)
        return self.talk.text(reply.tokens if reply else [])

    def _user(
        self, ids: list[int], random: Random
    ) -> Generator[Ask | Keep, Reply | None, str | None]:
        """A turn of the user; None after three that are no use."""
        for _ in range(3):
            warm = float(random.uniform(0.6, 1.0))
            ask = Ask(ids, 256, warm, self.talk.user_ends, is_reply=False)
            reply = yield ask
            assert reply is not None
            text = self.talk.text(reply.tokens)
            if reply.is_finished and _LEAST <= len(text) <= _MOST:
                return text
        return None

    def _article(
        self, random: Random, *, long: bool
    ) -> Generator[Ask | Keep, Reply | None, str]:
        topic = _topic(random, "things", "nature", "society", "life")
        ask = _pick(random, _ARTICLE).format(topic)
        temperature = WARM
        limit = 900 if long else 300
        reply = yield Ask(self.talk.prompt(ask), limit, temperature, self.talk.eos)
        yield Keep("article", temperature)
        return _whole_sentences(self.talk.text(reply.tokens if reply else []))


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file of JSON lines with `prompt` or `turns`.

    Raises UsageError for a file that cannot be read, FormatError naming the first line
    that is neither.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts: cannot read {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}, line {number}: {error}") from None
        turns = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
        turns = [turns] if isinstance(turns, str) else turns
        is_text = isinstance(turns, list) and all(isinstance(t, str) for t in turns)
        if not is_text or not turns or not all(t.strip() for t in turns):
            raise FormatError(
                f"{path}, line {number}: expected an object with prompt (text) or "
                f"turns (texts), got {line:.80}"
            )
        category = row.get("category")
        kind = category if isinstance(category, str) else "file"
        found.append(Prompt(tuple(turns), kind))
    if not found:
        raise FormatError(f"{path}: no prompts")
    return found


@cache
def topics() -> Mapping[str, tuple[str, ...]]:
    """What to talk about, by the sections of topics.txt."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    text = Path(__file__).with_name("topics.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("# "):
            name = line[2:]
        elif line:
            found[name] = tuple(line.split("; "))
    return found


def _temperature(random: Random) -> float:
    return 0.0 if random.random() < GREEDY else WARM


def _pick(random: Random, choices: tuple[str, ...]) -> str:
    return choices[int(random.integers(len(choices)))]


def _topic(random: Random, *sections: str) -> str:
    return _pick(random, sum((topics()[name] for name in sections), ()))


def _sentences(text: str) -> list[str]:
    joined = " ".join(text.split())
    return [s if s[-1] in ".!?" else f"{s}." for s in joined.split(". ") if s]


def _whole_sentences(text: str) -> str:
    """The text without a sentence that breaks off."""
    end = max(text.rfind(mark) for mark in (".", "!", "?"))
    return text[: end + 1] if end > 0 else text


def _fenced(text: str) -> str:
    """The first fenced block of a reply, else all of it."""
    parts = text.split("```")
    return f"```{parts[1]}```" if len(parts) > 2 else text


def _german(random: Random) -> str:
    """One to three German sentences."""
    made = []
    for _ in range(int(random.integers(1, 4))):
        parts = [_pick(random, column) for column in _GERMAN]
        made.append(" ".join(part for part in parts if part) + ".")
    return " ".join(made)


_QUESTIONS = (
    "What is {0}?",
    "What do you know about {0}?",
    "Why is {0} important?",
    "When did people first learn about {0}?",
    "Who was important in the history of {0}?",
    "How does {0} work?",
    "Where does {0} come from?",
    "what is {0} used for",
    "what is the meaning of {0}",
    "Tell me three facts about {0}.",
    "Is it true that {0} changed the world?",
)
_ASK_FOR_QUESTION = (
    "Write one short question of fact about {0}. Write the question only.",
    "Give me a quiz question about {0}, without the answer.",
    "What would a curious child ask about {0}? Write one question.",
)
_EXPLAIN = (
    "Explain {0} to a five-year-old.",
    "Explain how {0} works, step by step.",
    "Compare {0} and {1}. How are they alike and how do they differ?",
    "What are the advantages and disadvantages of {0}?",
    "How did {0} influence {1}?",
    "Give me five tips for {life}.",
    "I need help with {life}. What should I do first?",
    "How do I start with {life}?",
    "What are common mistakes people make with {life}?",
    "Describe the basic principles of {0} and give two examples.",
    "What questions remain open about {0}?",
    "Can you recommend a plan for {life}?",
)
_WRITE = (
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write an email to a friend about {life}.",
    "Write a formal letter about {life}.",
    "Write a blog post about {life} with an engaging title.",
    "Write a dialogue between {person} and a customer about {topic}.",
    "Write a speech about {topic} for a school.",
    "Write a product description for a book about {topic}.",
    "Write {n} headlines for an article about {topic}.",
    "Write {n} questions for an interview with {person}.",
    "Compose a song about {topic} with two verses and a chorus.",
    "Draft a short announcement about {life} for a newsletter.",
    "Write a story of {n} sentences in which {person} discovers {topic}.",
    "Make a list of {n} ideas about {life}.",
    "Write a review of a film about {topic}.",
    "Write an outline of an essay on {topic} with {n} sections.",
)
_ROLE = (
    "Imagine you are {person}. Tell me about {topic}.",
    "Pretend to be {person} and answer: what do you think about {topic}?",
    "You are {person}. I want to learn about {topic}. How would you begin?",
    "Act as {person}. Introduce yourself and explain {topic} in your own way.",
    "I want you to act as {person}. My first request is: help me with {topic}.",
    "Speak like {person} from now on. What is your opinion of {topic}?",
)
_ARTICLE = (
    "Write an encyclopedia article about {0}.",
    "Write a newspaper article about {0}.",
    "Write a report about an event that has to do with {0}. Include names and places.",
    "Write a detailed text about {0} for a magazine.",
    "Write about the history of {0}.",
)
_ABOUT = (
    "Write a paragraph about {0}.",
    "Write a few sentences about the history of {0}.",
    "Write a few sentences about {0} with dates and numbers.",
    "Describe {0} in one paragraph.",
)
_ASK_ABOUT = (
    "Write one question that this text answers. Write the question only.",
    "What could a teacher ask about this text? Write one question.",
)
_ANSWER = (
    "{passage}\n\nQuestion: {q}\nAnswer:",
    "Read the text and answer the question.\n\nText: {passage}\n\nQuestion: {q}",
    "{q} Use the following text to answer.\n\n{passage}",
    "Context: {passage}\n\nUsing only the context, answer: {q}",
)
_DO_WITH: Mapping[str, tuple[str, ...]] = {
    "summary": (
        "Summarize the following text.\n\n{passage}",
        "Summarize: {passage}",
        "Give a summary of this article in two or three sentences:\n{passage}",
        "{passage}\n\nWhat is the main point of this text? Keep it short.",
        "{passage}\n\nTL;DR:",
        "Write a one-paragraph summary of the article below.\n\n{passage}",
    ),
    "rewrite": (
        "Rewrite the following text in simpler words.\n\n{passage}",
        "Make this text more formal:\n\n{passage}",
        "Correct the grammar and improve the style of this text:\n{passage}",
        "Rewrite this as an email to a colleague:\n\n{passage}",
        "Shorten the following text to half its length.\n\n{passage}",
        "Continue this text:\n\n{passage}",
    ),
    "list": (
        "List the main points of the following text.\n\n{passage}",
        "Extract all names, places and dates from this text:\n\n{passage}",
        "{passage}\n\nWhich facts in this text are most important? Use bullet points.",
        "Write three quiz questions with answers about this text:\n\n{passage}",
        "Find a title for this text and five keywords.\n\n{passage}",
        "What is the tone of this text, and who might have written it?\n\n{passage}",
    ),
}
_SEARCH = (
    "Answer the question with the help of these search results.\n\n{found}\n\n"
    "Question: {q}",
    "Here are some documents:\n\n{found}\n\nBased on these documents, {q}",
    "{found}\n\nUse the passages above to answer: {q}",
    "Question: {q}\n\nPassages:\n{found}\n\nAnswer the question using the passages.",
)
_CODE = (
    "Write a {0} function that {1}.",
    "Write a {0} program that {1}. Add comments.",
    "How do I write code in {0} that {1}?",
    "Give me a {0} function that {1}, and an example of its use.",
)
_ABOUT_CODE = (
    "Explain what this code does.\n\n{code}",
    "What does the following {language} code do, line by line?\n\n{code}",
    "Write tests for this code:\n\n{code}",
    "Add comments to this code:\n\n{code}",
    "How could this code be improved?\n\n{code}",
    "Is there a bug in this code?\n\n{code}",
    "Translate this code to another programming language.\n\n{code}",
)
_TO = (
    "Translate to {0}: {1}",
    "Translate the following text into {0}.\n\n{1}",
    "How do you say this in {0}? {1}",
    "Translate English to {0}: {1}",
)
_FROM_GERMAN = (
    "Translate German to English: {0}",
    "Translate to English: {0}",
    "What does this mean in English? {0}",
    "Translate the following German text into English.\n\n{0}",
)
# Subject with verb, time, object, place: any choice from each makes a sentence.
_GERMAN = (
    (
        "Die Regierung besprach",
        "Der Bürgermeister eröffnete",
        "Meine Schwester besuchte",
        "Die Forscher untersuchten",
        "Der Verein plante",
        "Viele Menschen sahen",
        "Die Firma verkaufte",
        "Unser Lehrer beschrieb",
        "Die Kinder fanden",
        "Ein Reporter fotografierte",
        "Die Polizei sperrte",
        "Das Museum zeigte",
        "Der alte Mann kannte",
        "Die Stadt baute",
    ),
    (
        "gestern",
        "am Montag",
        "im vergangenen Jahr",
        "nach langer Zeit",
        "trotz des Regens",
        "zum ersten Mal",
        "in diesem Sommer",
        "wie erwartet",
        "ohne Erfolg",
        "",
    ),
    (
        "die neue Brücke",
        "das große Schiff",
        "ein kleines Theater",
        "den Bahnhof",
        "die Ausstellung",
        "mehrere alte Häuser",
        "den Garten des Nachbarn",
        "das Krankenhaus",
        "die Bibliothek",
        "eine Brauerei",
        "den höchsten Berg",
        "das Ergebnis der Wahl",
        "die Pläne für das Stadion",
    ),
    (
        "in Hamburg",
        "im Norden des Landes",
        "am Rand der Stadt",
        "mit großem Interesse",
        "für zwölf Millionen Euro",
        "vor den Augen der Gäste",
        "gegen den Willen der Anwohner",
        "auf der anderen Seite des Flusses",
        "zusammen mit ihren Freunden",
        "",
    ),
)
