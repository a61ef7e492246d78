"""Texts in another language than those asked for, on samples written for this test."""

from __future__ import annotations

import sys

import pytest

from medusa_train.distill import language
from medusa_train.distill.language import LanguageFilter, prose_of
from medusa_train.errors import InputError

SAMPLES = {
    "en": [
        "Write a short poem about the sea.",
        "My neighbour's dog barks all night. What can I say to him without starting a quarrel?",
        "lol u r so funny, i cant wait to see u at the party tonight",
        "Explain how a heat pump can move more energy than it uses, in three sentences.",
        "SHORT ANSWER PLEASE: WHICH PLANET HAS THE MOST MOONS?",
        "| Animal | Legs |\n|---|---|\n| spider | 8 |\n\nAdd two more animals to this table",
    ],
    "de": [
        "Schreibe ein kurzes Gedicht über das Meer und die Möwen.",
        "Wie kann ich meinem Chef sagen, dass ich weniger arbeiten möchte?",
        "Erkläre den Unterschied zwischen Umsatz und Gewinn an einem einfachen Beispiel.",
        "Was bedeutet der Satz „The early bird catches the worm“ auf Deutsch?",
    ],
    "fr": [
        "Quelle est la différence entre une comète et un astéroïde ?",
        "Rédige une réponse polie à un client qui demande un remboursement trop tard.",
        "Propose-moi un menu végétarien pour six personnes, avec une liste de courses.",
    ],
    "es": [
        "escribe un poema corto sobre el mar, por favor",
        "¿Cuáles son las ventajas de vivir en un pueblo pequeño?",
    ],
    "it": [
        "Come si prepara un buon risotto allo zafferano per quattro persone?",
        "Vorrei imparare a suonare la chitarra: da dove devo cominciare?",
    ],
    "pt": [
        "Escreva uma mensagem curta para agradecer aos meus colegas pela ajuda no projeto.",
        "Por que as folhas das árvores mudam de cor no outono?",
    ],
    "sv": ["Kan du ge mig tre tips om hur jag somnar lättare på kvällen?"],
    "cs": ["Napiš krátký příběh o kočce, která se bojí myší."],
    "el": ["Ποια είναι τα πλεονεκτήματα του να δουλεύει κανείς από το σπίτι;"],
    "uk": ["Поясни, будь ласка, чому вода в озері взимку не замерзає до самого дна."],
    "th": ["ช่วยแนะนำอาหารเช้าที่ทำง่ายและดีต่อสุขภาพให้หน่อย"],
    "id": ["Tolong jelaskan cara kerja kulkas dengan bahasa yang mudah dipahami anak-anak."],
    "he": ["איך אפשר ללמוד שפה חדשה בלי לגור במדינה שבה מדברים אותה?"],
    "nl": [
        "Waarom is het in de zomer langer licht dan in de winter, en hoe groot is het verschil?"
    ],
    "pl": ["Napisz krótką wiadomość do sąsiada, że w sobotę będzie u nas głośno."],
    "ru": [
        "Почему зимой дни короче, чем летом? Объясни простыми словами.",
        "Составь план тренировок на неделю для человека, который долго не занимался спортом.",
    ],
    "tr": ["Küçük bir bahçede hangi sebzeleri yetiştirmek daha kolaydır?"],
    "ar": ["اكتب رسالة قصيرة إلى صديق تدعوه فيها إلى العشاء يوم الجمعة."],
    "hi": ["बारिश के मौसम में पौधों की देखभाल कैसे करनी चाहिए?"],
    "zh": ["请解释为什么天空是蓝色的。", "帮我写一封邮件,告诉客户交货时间要推迟一周。"],
    "ja": ["日本の首都はどこですか。", "初心者でも作れる簡単な夕食のレシピを三つ教えてください。"],
    "ko": ["비 오는 날 집에서 아이들과 할 수 있는 놀이를 추천해 주세요."],
    "vi": ["Hãy viết một đoạn văn ngắn về buổi sáng ở làng quê của bạn."],
}
NEVER_WRONG = [
    "",
    "Hola",
    "Oui, bien sûr !",
    "42",
    "3.14159 26535 89793 23846 26433 83279 50288",
    "x**2 + y**2 == z**2",
    "def mean(values):\n    total = 0\n    for v in values:\n        total += v\n    return total",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY name;",
    "const page = await fetch(url);\nconsole.log(page.status);",
    'package main\n\nimport "fmt"\n\nfunc main() {\n    fmt.Println("guten Tag")\n}',
    "```python\nbegruessung = 'Guten Tag, wie geht es Ihnen heute Morgen'\nprint(begruessung)\n```",
    "Ok:\n```\nEs war einmal ein kleiner König, der hatte drei Töchter und keinen Sohn.",
    "Maria Gonzalez, Juan Fernandez, Hans Müller, Yuki Tanaka",
    "apples, bananas, cherries, mangoes, papayas, kiwis",
    "A B C D E F G A B C D E F G A B C D E F G C D E",
    "https://example.org/ein/langer/pfad/mit/vielen/deutschen/woertern/und/mehr",
    "$$\\int_0^1 x^2 dx = \\frac{1}{3}$$",
    "🎉🎉🎉 ✨✨ 🎂🎂🎂",
    "{'nombre': 'Ana', 'ciudad': 'Sevilla', 'edad': 31, 'activo': True}",
]


@pytest.fixture(scope="module")
def filters() -> dict[str, LanguageFilter]:
    return {code: LanguageFilter([code]) for code in SAMPLES}


def test_every_sample_is_right_in_its_own_language(filters: dict[str, LanguageFilter]) -> None:
    for code, texts in SAMPLES.items():
        assert [text for text in texts if filters[code].is_wrong(text)] == []


def test_every_sample_is_wrong_in_every_other_language(
    filters: dict[str, LanguageFilter],
) -> None:
    missed = [
        (code, other)
        for code, texts in SAMPLES.items()
        for other in SAMPLES
        for text in texts
        if other != code and not filters[other].is_wrong(text)
    ]
    # A sentence that quotes English, and the two languages that are nearest to each other.
    assert missed == [("de", "en"), ("uk", "ru")]


def test_code_numbers_and_short_texts_are_never_wrong(filters: dict[str, LanguageFilter]) -> None:
    wrong = [
        (code, text)
        for code in ("en", "de", "ru", "zh")
        for text in NEVER_WRONG
        if filters[code].is_wrong(text)
    ]
    assert wrong == []


def test_prose_around_a_code_block_counts(filters: dict[str, LanguageFilter]) -> None:
    text = "Warum gibt diese Funktion immer eine leere Liste zurück?\n```python\nreturn []\n```"
    assert prose_of(text) == "Warum gibt diese Funktion immer eine leere Liste zurück?"
    assert filters["en"].is_wrong(text)
    assert not filters["de"].is_wrong(text)


def test_several_languages_are_asked_for() -> None:
    both = LanguageFilter([" EN", "nb", "zh"])
    assert not any(map(both.is_wrong, SAMPLES["en"] + SAMPLES["zh"]))
    assert all(map(both.is_wrong, SAMPLES["fr"] + SAMPLES["ja"]))
    assert not both.is_wrong("Hvorfor er det så mørkt i Nord-Norge om vinteren, og når snur det?")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("english", "'english' is not a language that can be told; did you mean 'en'? (ISO"),
        ("de-DE", "did you mean 'de'?"),
        ("q", "did you mean 'sq' or 'qu'?"),
        ("zxx", "'zxx' is not a language"),
    ],
)
def test_unknown_codes(code: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        LanguageFilter(["en", code])
    assert message in str(raised.value)


def test_no_language_at_all() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LanguageFilter([])


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_load_identifier", language._load_identifier.__wrapped__)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(InputError, match=r"pip install 'medusa-train\[language\]'"):
        LanguageFilter(["en"])
