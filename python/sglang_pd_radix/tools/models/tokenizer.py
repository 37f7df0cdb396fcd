"""The tokenizer of made models, whose words survive a round trip through text; and the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_pd_radix.errors import PdRadixError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Of models with vision: delimiters of an image or video, and the placeholder of each part.
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, VIDEO)
# The assistant's text is trimmed and put behind one space: a client that strips the answer it got changes nothing, and
# the text is encoded as it was generated, word by word with a leading space.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' ~ message['role'] ~ '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- ' ' ~ ((message['content'] or '') | trim) }}"
    "{%- else %}"
    "{{- message['content'] or '' }}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
# The same where a content can be a list of texts and images.
VISION_CHAT_TEMPLATE = (
    "{%- macro text(content) %}"
    "{%- if content is string %}{{- content }}"
    "{%- else %}"
    "{%- for part in content or [] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] }}"
    "{%- elif part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{%- endmacro %}"
) + CHAT_TEMPLATE.replace("message['content'] or ''", "text(message['content'])")
# Common English words, so that ordinary prompts are not spelled out byte by byte.
_ENGLISH = """
a about above after again all also always an and any are as ask at away back bad be because been before began begin
best better between big black blue book both box boy bring build but buy by call came can car carry change city clear
close cold color come copy could country cut day did different do does done door down draw each early earth east easy
eat end engine enough even ever every example explain eye face fact fall family far fast father feel few find fire
first five follow food for form found four free from full game gave get girl give go good got great green grow had
half hand hard has have he head hear heart help helpful her here high him his home horse hot hour house how hundred i
idea if in inside into is it its just keep key kind king knew know land language large last late learn leave left less
let letter life light like line list little live long look made main make man many map may me mean men might mile mind
minute money month moon more morning most mother mountain move much music must my name near need never new next night
no north not note nothing now number of off often old on once one only open or order other our out over own page paper
part pass people picture place plain plan plant play please point poor power press pretty problem public pull put
question quick quiet rain ran read ready real reason red remember rest right river road rock room round rule run said
same saw say school sea second see seem send sentence set seven several shall she ship short should show side simple
since sing six size sky sleep slow small snow so some song soon sound south stand star start state stay step still
stop story street strong study such summer sun sure system table take talk tell ten than that the their them then
there these they thing think this those though thought thousand three through time to today together told too took top
town translate travel tree true try turn two under until up us use user very voice wait walk want war warm was watch
water way we week well went were west what wheel when where which while white who whole why will wind winter with
without wood word work world would write year yes yet you young your assistant tool
"""
_ONSETS = tuple("bdfghjklmnprstvz") + ("br", "dr", "fl", "gr", "kl", "st")
_VOWELS = tuple("aeiou")
_CODAS = ("", "n", "r", "l", "s", "k", "m")
# One unit per match, everything is covered: a word with at most one leading space, a digit, a run of signs, one space.
_PRE_TOKENIZER = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def _byte_alphabet() -> list[str]:
    """The printable stand-in for each byte value 0..255 that byte-level tokenizers use (GPT-2's convention)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256))
    return [chr(b) if b in visible else chr(256 + next(hidden)) for b in range(256)]


def _invented_words() -> Iterator[str]:
    """Two-syllable words in an order that mixes the syllables, without end (for a vocabulary of any sensible size)."""
    syllables = [o + v + c for c in _CODAS for v in _VOWELS for o in _ONSETS]
    count = len(syllables)
    for step in range(count):
        for first in range(count):
            yield syllables[first] + syllables[(first * 7 + step * 131 + 17) % count]


@dataclass(frozen=True)
class Vocabulary:
    """Token strings in id order (byte alphabet), and the ids that the model may emit: words with a leading space."""

    tokens: tuple[str, ...]
    emitted: range
    special: tuple[str, ...] = SPECIAL_TOKENS

    @property
    def special_ids(self) -> dict[str, int]:
        first = len(self.tokens) - len(self.special)
        return {token: first + i for i, token in enumerate(self.special)}


def make_vocabulary(size: int, special: tuple[str, ...] = SPECIAL_TOKENS) -> Vocabulary:
    """Lay out ``size`` tokens: 256 bytes, English words without leading space, words with one, special tokens."""
    alphabet = _byte_alphabet()
    space = alphabet[0x20]
    english = list(dict.fromkeys(_ENGLISH.split()))
    known = set(alphabet)
    bare = [w for w in dict.fromkeys(form for word in english for form in (word, word.capitalize())) if w not in known]
    spaced_capitals = [space + word.capitalize() for word in english]
    head = [*alphabet, *bare, *spaced_capitals]
    room = size - len(head) - len(special)
    if room < 2 * len(english):
        raise PdRadixError(f"--vocab {size} is too small: at least {size - room + 2 * len(english)} tokens are needed")
    words = dict.fromkeys(english)
    for word in _invented_words():
        if len(words) == room:
            break
        words.setdefault(word)
    if len(words) < room:
        raise PdRadixError(f"--vocab {size} is too large: at most {size - room + len(words)} tokens can be made")
    tokens = (*head, *(space + word for word in words), *special)
    return Vocabulary(tokens, range(len(head), len(head) + room), special)


def tokenizer_files(vocabulary: Vocabulary, max_positions: int) -> dict[str, dict[str, Any]]:
    """The contents of ``tokenizer.json`` and ``tokenizer_config.json``."""
    special = vocabulary.special_ids
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, index in special.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _PRE_TOKENIZER}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        # Without merges a unit is either one token of the vocabulary (ignore_merges) or its bytes: nothing in between,
        # which is what makes decode and encode exact inverses on emitted words.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens) if token not in special},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in added},
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": VISION_CHAT_TEMPLATE if IMAGE in special else CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
