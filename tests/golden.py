"""Prompts of many kinds: what the model continues must equal transformers, token for token."""

PLAIN = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\nfor i in range(",
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n  <head>\n    <title>My page</title>\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Q: What is 17 times 23?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "Ünïcödé tëxt mît Ümläuten und ß: die Straße ist",
    "日本の首都は東京です。フランスの首都は",
    "Привет, мир! Как дела? Сегодня хорошая погода, и мы",
    "🎉🎊 Party time! 🥳 Bring 🍰 and",
    "\t\tindented\twith\ttabs\n\n\n\nand blank lines\r\nand carriage returns",
    "In mathematics, a group is a set with a binary operation that is associative, has an identity",
    '{"name": "Alice", "age": 30, "children": [{"name":',
    "Dear Sir or Madam,\n\nI am writing to complain about the",
    "Water boils at 100 degrees Celsius because",
    "The following is a list of the planets of the solar system in order of distance: 1.",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
)
CHATS = (
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about autumn leaves."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red."},
        {"role": "user", "content": "And why are sunsets red?"},
    ],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
)
