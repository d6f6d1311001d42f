"""Varied lines of text for tokenizers, equal in every run."""

import random

PROSE = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "She said: \"I'll see what they've done -- we're late, aren't we?\" HE'D SAY 'TIS FINE, DON'T",
    "The café's naïve façade cost €1,234.56 (about £1,050); 50% off until 31/12/2099!",
    "A well-known e-mail: someone@example.org, see https://example.org/a?b=c&d=%20#frag",
    "In 1984, 42 people walked 3.14159 km in 2h45m at -40°C = -40°F; H₂O, x², ½ and Ⅷ.",
]
CODE = [
    "def f(x: int = 0) -> None:\n    return {'a': [x ** 2 for _ in range(10)]}\n\n\n",
    '\tif (a && b || !c) {\r\n\t\tprintf("%d\\n", 0x1F);\r\n\t}\r\n',
    "SELECT * FROM t WHERE id >= 1000 AND name LIKE '%x%';  -- comment",
    "for(int i=0;i<100000;++i){a[i]=i<<2;}  // ----------------",
    '<div class="x">&nbsp;</div>\n\n  <!-- 12345 -->\n',
    "git commit -m 'fix: #123' && make -j8 2>&1 | tee log.txt",
    "\\begin{equation} \\int_0^\\infty e^{-x^2}\\,dx \\end{equation}",
    "import numpy as np\n\n\nclass A(B):\n    '''doc'''\n\n    x = 1_000_000\n",
]
SCRIPTS = [
    "Быстрая лиса прыгает через ленивую собаку в 1917 году.",
    "Η γρήγορη αλεπού πηδάει πάνω από το σκυλί.",
    "いろはにほへと ちりぬるを。カタカナとABCと漢字123。",
    "我能吞下玻璃而不伤身体。价格：￥１２３４．５６",
    "나는 유리를 먹을 수 있어요. 그래도 아프지 않아요 100번",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني ١٢٣٤٥",
    "אני יכול לאכול זכוכית וזה לא מזיק לי.",
    "मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती १२३",
    "ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ๑๒๓",
    "Tôi có thể ăn thủy tinh mà không hại gì.",
    "நான் கண்ணாடி சாப்பிடுவேன், அதனால் எனக்கு ஒரு கேடும் வராது.",
    "მინას ვჭამ და არა მტკივა. Կրնամ ապակի ուտել",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒎𝒂𝒕𝒉 𝟙𝟚𝟛 𐍈𐌰 𓀀𓁐",
]
ODDITIES = [
    "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪🇫🇷", "❤️‍🔥", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "e\u0301", "n\u0303o",
    "a\u0308\u0323\u0301", "\u1100\u1161\u11a8", "Å", "\u212b", "ﬁ", "\u00a0", "\u2003",
    "\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\u2029", "\u0085",
    "\u202eabc\u202c", "\x00", "\x01\x02", "\x1b[31m", "\x1c\x1d\x1e\x1f", "\x7f", "\x0b",
    "\x0c", "\r", "\r\n", "\n", "\t", "\t\t", " ", "  ", "   ", "    ", " \n", "\n ",
    "\n\n", "\r\n\r\n", " \t ", "▁", "▁▁", "Ġ", "Ċ", "�", "\U0010ffff", "<|im_start|>",
    "<|im_end|>", "<|endoftext|", "<|im_start", "<repo_name>", "</s>", "<s>", "<0x41>",
    "[PAD1]", "<unk>", "'s", "'S", "'LL", "'d", "''", "’s", "ſ", "'ſ", "_", "__init__",
    "...", "!!!!", "----", "1", "22", "333", "4444", "55555", "٣٤", "²", "½", "a" * 37,
    "=" * 80, " " * 19, "0" * 33, "ab" * 20, "\n" * 7, "é" * 11, "👍" * 9,
]  # fmt: skip


def corpus_lines(count: int = 2400) -> list[str]:
    """Return texts made of every fragment alone, then of random runs of them."""
    rng = random.Random(20240229)
    fragments = [*PROSE, *CODE, *SCRIPTS, *ODDITIES]
    words = [word for text in (*PROSE, *SCRIPTS) for word in text.split(" ")]
    lines = list(fragments)
    while len(lines) < count:
        kind = rng.randrange(4)
        if kind == 0:
            lines.append("".join(rng.choices(ODDITIES, k=rng.randint(2, 8))))
        elif kind == 1:
            lines.append(" ".join(rng.choices(words, k=rng.randint(1, 12))))
        elif kind == 2:
            mixed = [rng.choice((rng.choice(words), rng.choice(ODDITIES))) for _ in range(10)]
            lines.append("".join(mixed))
        else:
            lines.append("".join(chr(_any_character(rng)) for _ in range(rng.randint(1, 24))))
    return lines


def _any_character(rng: random.Random) -> int:
    top = rng.choice((0x80, 0x250, 0x3000, 0xD800, 0x20000))
    code = rng.randrange(top)
    return code if not 0xD800 <= code < 0xE000 else 0xFFFD
