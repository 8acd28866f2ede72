"""Bodies of requests as no sane client writes them."""


def generate_body(token_ids: str = "[5,6]", **sampling: object) -> bytes:
    """JSON by hand: what Python would not write is wanted."""
    given = {"max_tokens": "2"} | sampling
    said = ",".join(f'"{key}":{value}' for key, value in given.items())
    return f'{{"token_ids":{token_ids},"sampling":{{{said}}}}}'.encode()


HUGE = "9" * 400
IDS = ["[]", "[-1]", "[259]", '"5"', "[5.5]", "[null]", "[true]"]
IDS += [f"[{number}]" for number in (HUGE, 2**63, -(2**63))]
"""259 is the first that is none."""
SAMPLING = {
    "max_tokens": ["0", HUGE, '"2"'],
    "temperature": ["NaN", "1e999", "-1", "null"],
    "temprature": ["1.0"],
    "top_p": ["0", "7.0", "-1e308"],
    "top_k": ["-2", 2**70],
    "min_p": ["1.5"],
    "seed": [2**63, -(2**63) - 1],
    "stop": ['[""]', "[1]"],
    "stop_token_ids": [f"[{2**70}]", "[-1]", "[259]"],
}
MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe\x00",
    b'{"token_ids":[5],"sampling":{"max_tokens":2}',
    b"[" * 100_000,
    b'{"token_ids":' * 20_000,
    b"5" * (10 << 20),
    generate_body("[" + "5," * 1_000_000 + "5]"),
    *map(generate_body, IDS),
    *(generate_body(**{key: value}) for key, values in SAMPLING.items() for value in values),
]
HARMLESS = [
    generate_body('[5],"token_ids":[6]'),  # the last of two keys counts
    generate_body(max_tokens=str(2**62)),
    generate_body(top_k=str(2**40)),
    generate_body(seed=str(2**63 - 1)),
    generate_body(seed="-1"),
    generate_body(stop='"' + "x" * 10_000 + '"'),
]
OPENAI = {"prompt": "[5,6]", "max_tokens": "2", "temperature": "0"}
SCHEMA = '{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"nothing"}}}'
VALUES = {
    "prompt": ["[259]", f"[{HUGE}]", "[[]]"],
    "temperature": ["NaN", "Infinity"],
    "top_p": ["NaN"],
    "logprobs": [1000000],
    "prompt_logprobs": [1000000],
    "seed": [2**70, -(2**70)],
    "top_k": [2**70],
    "logit_bias": ['{"999999":1}', '{"5":NaN}'],
    "allowed_token_ids": ["[999999]", "[-1]"],
    "bad_words": ['["\\u0000"]'],
    "repetition_penalty": ["NaN"],
    "presence_penalty": ["NaN"],
    "min_tokens": [HUGE],
    "stop_token_ids": [f"[{2**70}]"],
    "truncate_prompt_tokens": [-5],
    "priority": [2**70],
    "structured_outputs": ['{"regex":"((("}'],
    "response_format": [SCHEMA],
}
ODD = [{"n": "1000000", "temperature": "1"}]
ODD += [{key: value} for key, values in VALUES.items() for value in values]
