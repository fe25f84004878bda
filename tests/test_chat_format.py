"""Chat templates cut where user and assistant speak, and chat.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from longread.chat_format import SYSTEM_PROMPT, ChatFormat, derive_chat_format
from longread.errors import ModelError

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe nice.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3_LIKE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim }}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}
"""
WITHOUT_SYSTEM = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must take turns') }}
{% endif %}
{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %}
 {% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}{% endif %}
{% endfor %}
"""
SYSTEM_LAST = """\
{% for message in messages %}{% if message.role == 'user' %}<u>
{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}
{{ message.content }}</u>{% elif message.role == 'assistant' %}{{ message.content }}</s>{% endif %}
{% endfor %}
"""


def derive(template: str | None, bos: str | None = "<s>", eos: str | None = "</s>") -> ChatFormat:
    found = derive_chat_format(template, bos_token=bos, eos_token=eos)
    assert found["source"]
    return ChatFormat.from_fields(found)


def test_chatml_with_thinking_turned_off() -> None:
    chat = derive(CHATML, bos=None, eos="<|im_end|>")
    assert chat == ChatFormat(
        head=f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n",
        user_to_assistant="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        assistant_to_user="<|im_end|>\n<|im_start|>user\n",
    )


def test_bos_comes_once_and_the_template_decides_the_end_token() -> None:
    chat = derive(LLAMA3_LIKE, bos="<|bos|>", eos="<|end_of_text|>")
    assert chat.head == (
        f"<|bos|><|header|>system<|/header|>\n\n{SYSTEM_PROMPT}<|eot|><|header|>user<|/header|>\n\n"
    )
    assert chat.user_to_assistant == "<|eot|><|header|>assistant<|/header|>\n\n"
    assert chat.assistant_to_user == "<|eot|><|header|>user<|/header|>\n\n"


def test_a_template_without_a_system_role_gets_our_words_from_the_user() -> None:
    expected = ChatFormat(f"<s>[INST] {SYSTEM_PROMPT}\n\n", " [/INST]", "</s>[INST] ")
    assert derive(WITHOUT_SYSTEM) == expected
    found = derive_chat_format(WITHOUT_SYSTEM, bos_token="<s>", eos_token="</s>")
    assert found["source"] == "template without its system role"
    # chat.json is written once; the wording of our prompt may change after that.
    assert SYSTEM_PROMPT not in found["head"]


def test_a_system_role_that_moves_with_the_turns_is_not_used() -> None:
    assert derive(SYSTEM_LAST) == ChatFormat(f"<u>\n{SYSTEM_PROMPT}\n\n", "</u>", "</s><u>\n")


def test_an_answer_always_ends_before_the_next_turn() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert derive(template).assistant_to_user == "</s>\nuser: "
    assert derive(template, eos=None).assistant_to_user == "\nuser: "


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("", "no chat template"),
        ("{{ raise_exception('no chat\n here') }}", "no chat here"),
        ("{% for m in messages %}", "failed"),
        ("{{ 1 + 'a' }}", "failed"),
        ("{{ messages[-1].content }}", "missing, repeated or out of order"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "repeated"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", "changes"),
        ("{{ ().__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_a_plain_format_stands_in_for_a_useless_template(template: str | None, reason: str) -> None:
    found = derive_chat_format(template, bos_token="<s>", eos_token=None)
    assert found["source"].startswith("plain: ") and reason in found["source"]
    assert "\n" not in found["source"]
    assert derive(template, eos=None).head == f"<s>{SYSTEM_PROMPT}\n\n"


def test_the_date_in_a_template_does_not_change_with_the_day() -> None:
    dated = "{{ strftime_now('%d %b %Y') }}\n{{ {'a': 'é'} | tojson }}" + CHATML
    assert derive(dated).head.startswith('26 Jul 2024\n{"a": "é"}<|im_start|>')


@pytest.mark.parametrize("template", [CHATML, LLAMA3_LIKE, WITHOUT_SYSTEM])
def test_rendering_equals_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = derive(template)
    turns = [("user", "One?"), ("assistant", "Two."), ("user", "Three?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = "".join(
        (
            chat.head,
            "One?",
            chat.user_to_assistant.removesuffix(
                "<think>\n\n</think>\n\n"
            ),  # only for answers to come
            "Two.",
            chat.assistant_to_user,
            "Three?",
            chat.user_to_assistant,
        )
    )
    if template is WITHOUT_SYSTEM:
        messages[0]["content"] = f"{SYSTEM_PROMPT}\n\nOne?"
    else:
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    rendered, _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=True,
        enable_thinking=False,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert rendered == [expected]


def test_chat_json(tmp_path: Path) -> None:
    found = derive_chat_format(CHATML, bos_token=None, eos_token="<|im_end|>")
    (tmp_path / "chat.json").write_text(json.dumps(found))  # as a conversion writes it
    chat = ChatFormat.load(tmp_path)
    assert chat == derive(CHATML, bos=None, eos="<|im_end|>")
    assert chat.identity == ChatFormat.load(tmp_path).identity
    assert chat.identity != dataclasses.replace(chat, assistant_to_user="").identity
    for content in ("{", "[]", '{"head": ""}', '{"head": 1}'):
        (tmp_path / "chat.json").write_text(content)
        with pytest.raises(ModelError, match=r"chat\.json.*longread models"):
            ChatFormat.load(tmp_path)
