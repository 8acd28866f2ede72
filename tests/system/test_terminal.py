"""Untrusted text is made harmless and short."""

from rl.system.terminal import cut_middle, digits, visible


def test_what_acts_on_a_terminal_is_shown_and_the_rest_stays():
    assert visible("\x1b[31mred\x07\r\b\x00\x7f\x9b") == "\\x1b[31mred\\x07\\r\\x08\\x00\\x7f\\x9b"
    assert (
        visible("a\u202eb\u2066\u200b\ufeff\u2028\ud800")
        == "a\\u202eb\\u2066\\u200b\\ufeff\\u2028\\ud800"
    )
    plain = "line\n\ttab ümläut 汉字 ✓ e\u0301 \U0001f468\u200d\U0001f469 क\u200cष \\x1b"
    assert visible(plain) == plain


def test_the_middle_is_left_out_and_counted():
    assert cut_middle("abc\ndef", 7, 2) == "abc\ndef"
    assert cut_middle("abcdefghij", 4, 9) == "ab[... 6 characters ...]ij"
    assert cut_middle("abcdefghij", 5, 9) == "ab[... 6 characters ...]ij"
    assert cut_middle("\n".join("abcdefg"), 99, 4) == "a\nb\n[... 3 lines ...]\nf\ng"
    assert cut_middle("\n".join("abcdefg"), 99, 3) == "a\n[... 4 lines ...]\nf\ng"
    assert cut_middle("x\n" * 50_000, 1000, 10).count("\n") == 10


def test_numbers_have_few_digits_and_no_exponent_where_they_can_be_read_without():
    shown = {
        0.0: "0",
        0.12345: "0.123",
        12.345: "12.3",
        999.4: "999",
        999.7: "1000",
        1020.0: "1020",
        -12345.6: "-12346",
        1.25e-5: "1.25e-05",
    }
    assert {value: digits(value) for value in shown} == shown
    assert digits(5e9) == "5e+09"
    assert digits(12345.6, 4) == "12346"
    assert digits(float("nan")) == "nan" and digits(1234.4, 4) == "1234"
