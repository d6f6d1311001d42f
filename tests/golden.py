"""Prompts of many kinds: what the model continues must equal transformers, token for token."""

PLAIN = (
    "The capital of Italy is Rome, the capital of Spain is Madrid, the capital of Germany is "
    "Berlin, the capital of Austria is Vienna, and the capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who owned "
    "nothing but a leaking boat, a torn net and a grey cat that",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + "
    "fibonacci(n - 2)\n\n\ndef factorial(n):\n    if",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\nfor i in range(len(x)):\n    "
    "print(x[i], x[i] ** 2, np.sin(x[i]))\n",
    "SELECT name, COUNT(*) FROM users JOIN orders ON users.id = orders.user_id "
    "WHERE orders.total > 100 GROUP BY name HAVING",
    "<html>\n  <head>\n    <title>My page</title>\n  </head>\n  <body>\n    <h1>Welcome</h1>\n"
    "    <p class='intro'>",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    "Q: What is 12 times 12?\nA: 144\n\nQ: What is 5 times 9?\nA: 45\n\n"
    "Q: What is 17 times 23?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "Ünïcödé tëxt mît Ümläuten und ß: die Straße ist naß, der Bär frißt Äpfel, und",
    "日本の首都は東京です。フランスの首都は",
    "Привет, мир! Как дела? Сегодня хорошая погода, и мы",
    "🎉🎊 Party time! 🥳 Bring 🍰 and 🍕 and don't forget the 🎈🎈🎈, because we",
    "\t\tindented\twith\ttabs\n\n\n\nand blank lines\r\nand carriage returns\r\n\r\n   and blanks  "
    " at   odd   places  \n\n\tand more of them\t\t",
    "In mathematics, a group is a set with a binary operation that is associative, has an identity "
    "element, and gives every element an inverse. For example, the integers with",
    '{"name": "Alice", "age": 30, "children": [{"name": "Bob", "age": 3}, {"name": "Carol", "age":',
    "Dear Sir or Madam,\n\nI am writing to complain about the washing machine that I bought from "
    "your shop on the third of March, which has never",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain it boils at a lower "
    "temperature, because the pressure of the air there",
    "The following is a list of the planets of the solar system in order of distance from the Sun: "
    "1. Mercury 2. Venus 3. Earth 4.",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune,",
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
