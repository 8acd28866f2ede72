"""Bodies of requests as no sane client writes them."""


def generate_body(token_ids: str = "[5,6]", **sampling: str) -> bytes:
    """JSON by hand: what Python would not write is wanted."""
    given = {"max_tokens": "2"} | sampling
    said = ",".join(f'"{key}":{value}' for key, value in given.items())
    return f'{{"token_ids":{token_ids},"sampling":{{{said}}}}}'.encode()


HUGE = "9" * 400
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
    generate_body("[]"),
    generate_body("[-1]"),
    generate_body("[259]"),  # the first id that is none
    generate_body('"5"'),
    generate_body("[5.5]"),
    generate_body("[null]"),
    generate_body("[true]"),
    generate_body(f"[{HUGE}]"),
    generate_body(f"[{2**63}]"),
    generate_body("[-9223372036854775808]"),
    generate_body(max_tokens="0"),
    generate_body(max_tokens=HUGE),
    generate_body(max_tokens='"2"'),
    generate_body(temperature="NaN"),
    generate_body(temperature="1e999"),
    generate_body(temperature="-1"),
    generate_body(temperature="null"),
    generate_body(temprature="1.0"),
    generate_body(top_p="0"),
    generate_body(top_p="7.0"),
    generate_body(top_p="-1e308"),
    generate_body(top_k="-2"),
    generate_body(top_k=str(2**70)),
    generate_body(min_p="1.5"),
    generate_body(seed=str(2**63)),
    generate_body(seed=str(-(2**63) - 1)),
    generate_body(stop='[""]'),
    generate_body(stop="[1]"),
    generate_body(stop_token_ids=f"[{2**70}]"),
    generate_body(stop_token_ids="[-1]"),
    generate_body(stop_token_ids="[259]"),
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
ODD = [
    {"prompt": "[259]"},
    {"prompt": f"[{HUGE}]"},
    {"prompt": "[[]]"},
    {"temperature": "NaN"},
    {"temperature": "Infinity"},
    {"top_p": "NaN"},
    {"n": "1000000", "temperature": "1"},
    {"logprobs": "1000000"},
    {"prompt_logprobs": "1000000"},
    {"seed": str(2**70)},
    {"seed": str(-(2**70))},
    {"top_k": str(2**70)},
    {"logit_bias": '{"999999":1}'},
    {"logit_bias": '{"5":NaN}'},
    {"allowed_token_ids": "[999999]"},
    {"allowed_token_ids": "[-1]"},
    {"bad_words": '["\\u0000"]'},
    {"repetition_penalty": "NaN"},
    {"presence_penalty": "NaN"},
    {"min_tokens": HUGE},
    {"stop_token_ids": f"[{2**70}]"},
    {"truncate_prompt_tokens": "-5"},
    {"priority": str(2**70)},
    {"structured_outputs": '{"regex":"((("}'},
    {
        "response_format": '{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"nothing"}}}'
    },
]
