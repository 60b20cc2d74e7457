"""Writes snippets.json: what jinja2, set up as transformers does, makes of expressions and tags that chat templates may use.

    python snippets.py        # transformers 5.24.0, jinja2 3.1.6; no torch

The file holds the messages that each snippet is given, as JSON text, and for each snippet the text that it writes, or null where jinja2 raises.
"""

import json
import pathlib

from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
# As text: Python reads 100000000000000000000, -0 and -0.0 each in its own way.
MESSAGES = r"""[{"role": "user", "content": "Hello World, hello", "none": null, "list": [3, 1, 2], "words": ["b", "a", "C"], "empty": "", "zero": 0,
"big": 100000000000000000000, "huge": -1234567890123456789012345678901234567890123, "negative_zero": -0, "float_zero": -0.0, "float": 1.5,
"map": {"b": 1, "a": "é\u007f🙂", "list": [1, [], {}], "none": null}, "yes": true, "no": false, "lines": "a\nb\r\nc\n", "spaced": "  two  words ",
"unicode": "Straße ÉÈ ǅ", "nested": [{"n": 2, "k": "x"}, {"n": 1, "k": "y"}, {"k": "x"}]}, {"role": "assistant", "content": "a,b,,c"}]"""

# Expressions; m is the first message and u is undefined.
JSON = [
    "m.map|tojson", "m.map|tojson(indent=2)", "m.map|tojson(ensure_ascii=True)", "m.map|tojson(sort_keys=True)", "m.map|tojson(true)",
    "m.map|tojson(false, 1)", "m.map|tojson(false, none, (',', ':'))", "m.map|tojson(false, none, none, true)", "m.map|tojson(separators=(',', ':'))",
    "m.map|tojson(separators=[',', ': '], indent=1)", "m.map|tojson(indent='--')", "m.map|tojson(indent=0)", "m.map|tojson(indent=-1)",
    "m.map|tojson(indent=true)", "m.map|tojson(separators=(',',))", "m.map|tojson(separators=',:')", "m.map|tojson(5, indent=2)", "m.map|tojson(foo=1)",
    "m.map|tojson(none, none, none, none, none)", "m.map|tojson(ensure_ascii=False, ensure_ascii=True)", "m.big|tojson", "m.huge|tojson",
    "m.negative_zero|tojson", "m.float_zero|tojson", "[m.big, m.huge]|tojson", "m.big", "m.huge", "m.negative_zero", "m.float_zero", "m.huge|string",
    "m.big is number", "m.big is integer", "m.huge is number", "m.huge is integer", "m.big + 1", "m.huge ~ 'x'", "m.huge == m.huge", "{1: 2, true: 3}|tojson",
    "{none: 1, 1.5: 2}|tojson", "{'b': 1, 'a': 2}|tojson(sort_keys=true)", "{1: 1, 'a': 2}|tojson(sort_keys=true)", "u|tojson", "[u]|tojson",
    "{'a': u}|tojson", "m.none|tojson", "m.yes|tojson", "'<&>\\''|tojson", "(1, 2)|tojson", "range(3)|list|tojson", "m.words|map('upper')|list|tojson",
    "1.0|tojson", "1e20|tojson", "1e-7|tojson", "m.float|tojson", "m.map.items()|list|tojson", "namespace(a=1)|tojson", "m.list[1:]|tojson", "m.spaced.split()|tojson",
    "m.list|sort|tojson", "m.map|dictsort|tojson", "m.nested|selectattr('k', 'equalto', 'x')|list|tojson", "m.map|items|list|tojson", "'é'|tojson|length",
]
UNDEFINED = [
    "u", "u.x", "u['x']", "u()", "u.x()", "u + 1", "1 + u", "u - 1", "u * 2", "u / 2", "u // 2", "u % 2", "u ** 2", "-u", "+u", "u < 1", "1 > u", "u >= 1",
    "u == 1", "u != 1", "u == u", "u ~ 'x'", "not u", "u and 1", "u or 1", "u if u else 2", "'a' in u", "u in 'abc'", "u in [1]", "u[1:]", "u[0]",
    "u|length", "u|trim", "u|upper", "u|lower", "u|join", "u|join(',')", "u|list", "u|first", "u|last", "u|int", "u|float", "u|abs", "u|string",
    "u|default('x')", "u|d('x', true)", "u|items|list", "u|sort", "u|unique|list", "u|map('upper')|list", "u|replace('a', 'b')", "u|safe", "u|e", "u|reverse|list",
    "u|sum", "u|max", "u|min", "u|round", "u|capitalize", "u|title", "u|indent", "u|dictsort", "u|selectattr('x')|list", "u|select|list", "u|reject('x')|list",
    "u|groupby('x')", "u|batch(2)|list", "u|wordcount", "u|truncate(3)", "u|format(1)", "'%s'|format(u)", "'{}'.format(u)", "[u]", "{'a': u}", "(u, 1)",
    "u is defined", "u is undefined", "u is none", "u is string", "u is mapping", "u is iterable", "u is sequence", "u is number", "u is true", "u is odd",
    "u is eq 1", "u is in [1]", "u is lt 1", "range(u)", "raise_exception(u)", "u.strip()", "'a'.join(u)", "'a'.replace(u, 'b')", "'a'.split(u)", "'a'.startswith(u)",
    "m.map.get(u)", "m.map[u]", "m.list[u]", "u|attr('x')", "m|attr('role')", "m.missing", "m['missing']", "m.missing.x", "m.list[10]", "m.list[10].x", "m.role.x", "m.zero.x", "m.none.x",
    "messages[5]", "messages[5].content", "messages[5]['content']", "namespace(a=1).b", "namespace(a=1).b.c", "dict(a=1).b", "u|tojson(indent=2)", "u|xmlattr", "u|urlencode",
]
NONE = [
    "m.none", "m.none + 'x'", "'x' + m.none", "m.none + 1", "m.none ~ 'x'", "m.none|length", "m.none|trim", "m.none|upper", "m.none|join", "m.none|list", "m.none|first",
    "m.none|default('x')", "m.none|default('x', true)", "m.none|string", "m.none|int", "m.none|items|list", "m.none[0]", "m.none[1:]", "m.none[:1]", "m.none['a']",
    "m.none.strip()", "'a' in m.none", "m.none in ['a']", "m.none in [none]", "m.none < 1", "m.none == none", "m.none is iterable", "m.none is sequence", "m.none is mapping",
    "m.none is string", "m.none|replace('a', 'b')", "m.none|sort", "m.none|unique|list", "m.none|map('upper')|list", "m.none|selectattr('x')|list", "m.none|reverse|list",
    "m.none|sum", "m.none|dictsort", "m.none * 2", "-m.none", "m.none()", "m.none|capitalize", "m.none|last", "m.none|max", "m.none|batch(2)|list", "m.none|rejectattr('x')|list",
    "'x'.join(m.none)", "range(m.none)", "m.none|float", "m.none|round", "m.none|abs", "m.none|indent", "m.none|safe", "m.none|e", "m.none|tojson", "m.none|format(1)", "m.none|groupby('x')",
]
TYPES = [
    "'a' < 1", "'a' > 1", "[1] < [2]", "[1] < 1", "{} < {}", "1 < 1.5", "true < 2", "'a' < 'b'", "(1, 2) < (1, 3)", "none < none", "'a' + 1", "1 + 'a'", "'a' * 3", "3 * 'a'", "[1] * 2",
    "[1] + [2]", "[1] + (2,)", "[1] + 'a'", "'a' - 'b'", "1 / 2", "4 / 2", "7 // 2", "-7 // 2", "7 % 3", "-7 % 3", "2 ** 10", "2 ** -1", "1 / 0", "1 % 0", "1 // 0", "7.5 // 2", "true + 1",
    "1 == 1.0", "true == 1", "'1' == 1", "[1] == [1]", "{'a': 1} == {'a': 1}", "(1,) == [1]", "1 in [1.0]", "'a' in {'a': 1}", "1 in 'abc'", "'b' in 'abc'", "[1] in [[1]]",
    "m.list is sequence", "m.list[:2] is sequence", "([1] + [2]) is sequence", "messages[1:] is sequence", "[1] + [2] < [3]", "[[u]][:1]", "[u] + [1]", "'ab' is sequence", "m.map is sequence", "5 is sequence", "m.none is sequence", "(1, 2) is sequence", "range(3) is sequence", "m.map.keys() is sequence",
    "m.map.items() is sequence", "(m.list|map('abs')) is sequence", "m.list is iterable", "'ab' is iterable", "m.map is iterable", "5 is iterable", "range(3) is iterable", "m.list is mapping",
    "m.map is mapping", "'ab' is mapping", "'ab' is string", "5 is string", "5 is number", "1.5 is number", "true is number", "true is integer", "5 is integer", "1.5 is integer", "1.5 is float",
    "5 is float", "true is boolean", "5 is boolean", "none is none", "5 is odd", "4 is even", "6 is divisibleby 3", "6 is divisibleby(4)", "'a' is lower", "'A' is upper", "5 is sameas 5",
    "m.list is sameas m.list", "raise_exception is callable", "5 is callable", "'ab' is escaped", "'upper' is filter", "'odd' is test", "5 is eq 5", "5 is ne 5", "5 is gt 4", "5 is ge 5", "5 is le 4",
    "'a' is in 'abc'", "5 is not odd", "true", "True", "none", "None", "[true, none, 'a', 1.0]", "{'a': [1, 'b']}", "('a',)", "()", "(1, 2)", "'it\\'s'", "['it\\'s', 'say \"x\"', 'b\\n', 'é']",
    "1e3", "1e16", "1e-5", "1_000", "0x10", "1.0", "100.0 * 3", "0.1 + 0.2", "10 ** 20", "m.yes", "m.no|string", "not 1", "1 and 2", "0 or 'x'", "1 if m.yes", "1 if m.no", "1 if m.no else 2",
    "'a' 'b'", "'a' ~ 1 ~ none ~ true", "[1, 2][-1]", "'abc'[-1]", "'abc'[1:]", "'abcdef'[::2]", "'abc'[::-1]", "[1, 2, 3][::-1]", "m.list[:2]", "m.list[-2:]", "m.map['b']", "m.map.b", "m.map.missing is defined",
    "m['role']", "m.get('role')", "m.get('x')", "m.get('x', 'y')", "m.keys()|list|length", "m.values()|list|length", "m.map.items()|list", "m.map.pop('b')", "m.list.append(1)", "m.map.update({'a': 1})",
    "m.list.index(1)", "m.list.index(9)", "m.list.count(1)", "m.list.pop()", "m.list.copy()", "m.map.copy()", "(1, 2, 1).count(1)", "(1, 2).index(2)", "dict(a=1, b=2)", "dict({'a': 1}, b=2)", "dict([('a', 1)])",
    "dict.fromkeys(['a'], 1)", "5.0.is_integer()", "(5).bit_length()", "m.float.is_integer()",
]
STRINGS = [
    "m.content.rsplit(' ')", "m.content.rsplit(' ', 1)", "m.content.rsplit()", "m.content.rsplit(none, 1)", "m.content.rsplit(', ', maxsplit=1)", "m.content.split()", "m.content.split(' ', 1)",
    "m.content.split(maxsplit=1)", "m.content.split('')", "m.content.rsplit('')", "m.spaced.split()", "m.spaced.rsplit(none, 1)", "m.spaced.split(' ')", "m.spaced.split(none, 1)", "m.empty.split()", "m.empty.split(',')",
    "m.content.partition(', ')", "m.content.partition('x')", "m.content.rpartition(' ')", "m.content.rpartition('x')", "m.content.partition('')", "m.content.removeprefix('Hello')", "m.content.removeprefix('x')",
    "m.content.removesuffix('hello')", "m.content.removesuffix('')", "m.content.removesuffix('x')", "m.content.index('World')", "m.content.index('x')", "m.content.rindex('l')", "m.content.rindex('x')", "m.content.find('l')",
    "m.content.find('l', 5)", "m.content.find('l', 5, 8)", "m.content.find('x')", "m.content.rfind('l')", "m.content.rfind('l', 0, 5)", "m.content.find('l', -4)", "m.content.index('l', 4)", "m.content.count('l')", "m.content.count('l', 5)",
    "m.content.count('')", "m.content.startswith('Hello')", "m.content.startswith(('x', 'Hello'))", "m.content.startswith('World', 6)", "m.content.endswith('hello')", "m.content.endswith(('x', 'lo'))", "m.content.endswith('World', 0, 11)",
    "m.content.startswith(5)", "m.content.upper()", "m.content.lower()", "m.content.title()", "m.content.capitalize()", "m.content.swapcase()", "m.content.casefold()", "m.unicode.upper()", "m.unicode.lower()", "m.unicode.title()",
    "m.unicode.capitalize()", "m.unicode.swapcase()", "m.unicode.casefold()", "m.content.zfill(25)", "'5'.zfill(3)", "'-5'.zfill(4)", "'+5'.zfill(4)", "'a'.ljust(3) ~ '|'", "'a'.rjust(3)", "'a'.center(4) ~ '|'", "'a'.center(5, '*')",
    "'ab'.center(5, '*')", "'a'.ljust(3, '*')", "'a'.rjust(3, 'xy')", "'a\\tb'.expandtabs()", "'a\\tb'.expandtabs(4)", "m.lines.splitlines()", "m.lines.splitlines(true)", "m.lines.splitlines(keepends=true)", "'a\\x0bb\\x0cc\\x1cd\\x85e\\u2028f'.splitlines()",
    "m.spaced.strip()", "m.spaced.lstrip()", "m.spaced.rstrip() ~ '|'", "'xxaxx'.strip('x')", "'xyaxy'.strip('yx')", "'xxaxx'.lstrip('x')", "'xxaxx'.rstrip('x')", "m.spaced.strip(none)", "'\\x1fa\\x85'.strip()|length", "m.content.replace('l', 'L')",
    "m.content.replace('l', 'L', 1)", "m.content.replace('', '-')", "m.content.replace('l', 'L', count=1)", "', '.join(m.words)", "', '.join(m.list)", "''.join('abc')", "'-'.join(m.map)", "'5'.isdigit()", "'a'.isdigit()", "'²'.isdigit()", "'½'.isnumeric()", "'½'.isdigit()",
    "'5'.isdecimal()", "'٥'.isdecimal()", "'a'.isalpha()", "'a1'.isalnum()", "'ab c'.isidentifier()", "'ab'.isidentifier()", "'a'.isascii()", "'é'.isascii()", "''.isascii()", "' '.isspace()", "'A b'.isupper()", "'A'.isupper()", "'a1'.islower()", "'Ab Cd'.istitle()",
    "'\\n'.isprintable()", "'a'.isprintable()", "'abc'.translate({97: 'x'})", "'abc'.encode()", "'a'.foo()", "'a'.x", "'a %s' % 'b'", "'%s and %s' % ('a', 1)", "'%d' % 5", "'%5d|' % 5", "'%-5d|' % 5", "'%05d' % 5", "'%.2f' % 1.555", "'%s' % none", "'%s' % m.list",
    "'%r' % 'a'", "'%x' % 255", "'%X' % 255", "'%o' % 8", "'%e' % 1234.5", "'%g' % 1234.5", "'%c' % 'a'", "'%%'", "'%%' % ()", "'%(a)s' % {'a': 1}", "'%s' % ('a', 'b')", "'%s %s' % 'a'", "'%s' % ('a',)", "'%s' % [('a',)]", "'%+d' % 5", "'% d' % 5", "'%s%%' % 5", "'%i' % 5.7",
    "'%d' % 'a'", "'%s' % u", "'%5s|' % 'é'", "'%.1s' % 'abc'", "'%*d' % (5, 1)", "'a' % 1", "'a' % ()", "'a' % []", "'%s'|format('a')", "'%s %d'|format('a', 5)", "'%(a)s'|format(a=1)", "'{} {}'.format(1, 'a')", "'{0} {1} {0}'.format(1, 2)", "'{a}'.format(a=1)", "'{:>5}'.format('a')", "'{:<5}|'.format('a')",
    "'{:^5}|'.format('a')", "'{:*^5}'.format('a')", "'{:>5}'.format('é')", "'{:.1}'.format('éa')", "'%.1s' % 'éa'", "'%s' % 'é'", "'{:05d}'.format(5)", "'{:.2f}'.format(1.555)", "'{:,}'.format(1234567)", "'{:x}'.format(255)", "'{!r}'.format('a')", "'{{}}'.format()", "'{}'.format(none)", "'{}'.format(m.list)", "'{}'.format()", "'{0[a]}'.format({'a': 1})", "'{:%}'.format(0.5)", "'{a.b}'.format(a={'b': 1})",
    "m.spaced|trim", "'xax'|trim('x')", "m.content|upper", "m.content|lower", "m.content|capitalize", "m.content|title", "\"it's a-b c\"|title", "m.content|replace('l', 'L')", "m.content|replace('l', 'L', 1)", "m.content|length", "m.content|count", "m.content|wordcount", "'a,b c_d é'|wordcount", "m.empty|wordcount",
    "5|wordcount", "m.content|truncate(9)", "m.content|truncate(9, true)", "m.content|truncate(9, true, '..')", "m.content|truncate(9, false, '..', 0)", "m.content|truncate(12, leeway=0)", "m.content|truncate(2)", "m.content|truncate(length=9, end='')", "m.content|truncate(17)", "m.content|truncate(13, false, '...', 0)", "m.content|truncate",
    "m.list|truncate(3)", "m.content|truncate(3, true, '....')", "m.lines|indent", "m.lines|indent(2)", "m.lines|indent(2, true)", "m.lines|indent(2, true, true)", "m.lines|indent('> ')", "m.lines|indent(width=2, first=true)", "'a\\n\\nb'|indent(2)", "'a\\n\\nb'|indent(2, blank=true)", "m.content|wordwrap(6)", "m.content|center(30)", "'a'|center(4) ~ '|'",
    "m.content|reverse", "m.content|first", "m.content|last", "m.content|list|length", "'abc'|list", "m.content|striptags", "'<b>a</b>  b'|striptags", "m.content|urlencode", "'a b&é/'|urlencode", "m.content|e", "'<a>'|e", "'<a>'|escape", "'<a>'|safe", "'<a>'|forceescape", "m.content|int", "'5'|int", "'5.7'|int", "'x'|int(3)", "'0x1f'|int(0, 16)", "'1e3'|float", "'x'|float",
    "'5'|float", "5|string ~ 'x'", "'a'|filesizeformat", "1000|filesizeformat", "'a'|pprint", "m.map|pprint", "'www.a.org'|urlize", "m.map|xmlattr",
]
LISTS = [
    "m.list|join", "m.list|join(', ')", "m.nested|join(', ', attribute='k')", "m.nested|join(', ', 'k')", "m.words|join(d=', ')", "m.list|first", "m.list|last", "[]|first", "[]|last", "m.list|length", "m.map|length", "5|length", "m.list|sort", "m.words|sort", "m.words|sort(case_sensitive=true)", "m.list|sort(reverse=true)", "m.list|sort(true)",
    "m.nested[:2]|sort(attribute='n')|map(attribute='k')|list", "m.nested|sort(attribute='n')", "m.list|reverse|list", "m.list|sum", "m.nested[:2]|sum(attribute='n')", "m.list|sum(start=10)", "m.list|max", "m.list|min", "m.words|min", "[]|max", "m.nested[:2]|max(attribute='n')", "m.list|unique|list", "['a', 'A', 'b']|unique|list", "['a', 'A']|unique(true)|list",
    "m.nested|unique(attribute='k')|list|length", "m.words|map('upper')|list", "m.nested|map(attribute='k')|list", "m.nested|map(attribute='n')|list", "m.nested|map(attribute='n', default=0)|list", "m.nested|map(attribute='missing')|list", "m.words|map('replace', 'a', 'x')|list", "m.list|map('string')|join(',')", "m.words|map('foo')|list", "m.list|select('odd')|list",
    "m.list|select|list", "m.list|reject('odd')|list", "m.list|select('gt', 1)|list", "m.list|select('>', 1)|list", "m.nested|selectattr('n')|list|length", "m.nested|selectattr('k', 'equalto', 'x')|list|length", "m.nested|selectattr('k', 'eq', 'x')|map(attribute='n')|list", "m.nested|rejectattr('n')|list|length", "m.nested|rejectattr('k', 'in', ['x'])|list",
    "m.nested|selectattr('n', 'defined')|list|length", "m.nested|groupby('k')|length", "m.nested|groupby('k')|map(attribute='grouper')|list", "(m.nested|groupby('k'))[0].list|length", "m.nested|groupby('n', default=0)|length", "m.list|batch(2)|list", "m.list|batch(2, 0)|list", "m.list|slice(2)|list", "m.list|slice(2, 0)|list", "m.map|items|list", "m.map|dictsort", "m.map|dictsort|first", "{'b': 1, 'A': 2}|dictsort",
    "{'b': 1, 'A': 2}|dictsort(true)", "{'b': 1, 'a': 2}|dictsort(by='value')", "{'b': 1, 'a': 2}|dictsort(reverse=true)", "m.map|list", "m.map|first", "m.map|sort", "m.map|join(',')", "5|abs", "-5|abs", "5.5|round", "2.5|round", "3.5|round", "5.55|round(1)", "5.5|round(0, 'floor')", "5.1|round(method='ceil')", "5.7|int", "none|int", "true|int", "5|float", "'a'|default('b')", "''|default('b')",
    "''|default('b', true)", "''|d('b', boolean=true)", "m|attr('role')", "range(3)|list", "range(1, 6, 2)|list", "range(3, 0, -1)|list", "range(3)", "range(3)|length", "range(3)[1]", "zip('ab', 'cd')|list", "m.list|zip('abc')|list", "cycler('a', 'b').next()", "joiner(', ')()", "namespace(a=1).a", "[1, [2]]|flatten", "m.list|tojson|length", "[3, 1]|sort|join('-')",
    "m.list in [[3, 1, 2]]", "(m.list, 1)|length", "[m.list, m.map]|length", "[1, 2]|map('multiply', 2)|list",
]
STATEMENTS = [
    "{% for x in m.none %}{{ x }}{% endfor %}", "{% for x in u %}{{ x }}{% else %}none{% endfor %}", "{% for x in 5 %}{{ x }}{% endfor %}", "{% for x in m.none if x %}{{ x }}{% endfor %}", "{% for x in m.missing or [] %}{{ x }}{% else %}e{% endfor %}", "{% for x in m.none or [] %}{{ x }}{% else %}e{% endfor %}",
    "{%- for x in m.none -%}{{ x }}{%- endfor -%}", "{% for k, v in m.none %}{% endfor %}", "{% for k, v in m.none.items() %}{% endfor %}", "{% for x in (m.none) %}{% endfor %}", "{% for x in m.list if x > 1 %}{{ x }}{% endfor %}", "{% for x in m.list recursive %}{{ x }}{% endfor %}", "{% for x in m.list if x > 1 recursive %}{{ loop.index }}{% endfor %}",
    "{% for x in [[1], none] recursive %}{% if x %}{{ loop(x) if x is iterable else x }}{% endif %}{% endfor %}", "{% for x in 'a if b' %}{{ x }}.{% endfor %}", "{% for x in {'in': 1} %}{{ x }}{% endfor %}", "{% for x in [1, 2], [3] %}{{ x }}{% endfor %}", "{% for x in 1, 2 %}{{ x }}{% endfor %}", "{% for a, b in [(1, 2)] %}{{ a }}{{ b }}{% endfor %}",
    "{% for a, b in ['xy'] %}{{ a }}{{ b }}{% endfor %}", "{% for k, v in ['ab'] %}{{ k }}{{ v }}{% endfor %}", "{% for a, b in ['xyz'] %}{{ a }}{{ b }}{% endfor %}", "{% for a, b in [5] %}{{ a }}{% endfor %}", "{% for a in m.map %}{{ a }}{% endfor %}", "{% for k, v in m.map.items() %}{{ k }}={{ v }};{% endfor %}", "{% for c in 'abc' %}{{ c }}.{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set _ = c.reset() %}{{ c.next() }}", "{% set c = cycler('a', 'b') %}{% for x in m.list %}{{ c.next() }}{% endfor %}", "{{ cycler() }}", "{% set j = joiner(', ') %}{% for x in m.list %}{{ j() }}{{ x }}{% endfor %}", "{% set j = joiner() %}{{ j() }}a{{ j() }}b",
    "{% set j = joiner(sep='-') %}{{ j() }}a{{ j() }}b", "{% for x in m.list %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for x in m.list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}", "{% for x in m.list %}{{ loop.previtem }}<{{ loop.nextitem }};{% endfor %}", "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}",
    "{% for x in m.list %}{% if loop.previtem is defined %}{{ loop.previtem }}{% endif %}{% endfor %}", "{% for x in m.list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in m.list %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% set x = 1 %}{% for y in m.list %}{% set x = y %}{% endfor %}{{ x }}", "{% set ns = namespace(x=1) %}{% for y in m.list %}{% set ns.x = y %}{% endfor %}{{ ns.x }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a, b = 'xy' %}{{ a }}{{ b }}", "{% set a, b = [1] %}{{ a }}", "{% set x %}a{{ 1 }}{% endset %}{{ x }}", "{% set x | upper %}a{% endset %}{{ x }}", "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}", "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}", "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, c=3) }}",
    "{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f() }}", "{% if u %}a{% else %}b{% endif %}", "{% if u is defined and u.x %}a{% endif %}b", "{% if u.x %}a{% endif %}", "{% if m.none.x %}a{% endif %}b", "{% if m.missing.x %}a{% endif %}b", "{% if 'a' in m.none %}a{% endif %}b", "{% if m.content is not none and 'Hello' in m.content %}a{% endif %}", "{% with a = 1 %}{{ a }}{% endwith %}", "{% filter upper %}a{% endfilter %}", "{% raw %}{{ a }}{% endraw %}", "{# c #}a",
    "{% if true %}\na\n{% endif %}\nb", "  {% if true %}a{% endif %}", "{{ 'a' -}} b", "a {{- 'b' }}", "{%+ if true %}a{% endif %}", "a\n{%- if true %}\nb{% endif %}", "{% do m.list.append(1) %}", "{% include 'x' %}", "{% extends 'x' %}", "{% block a %}x{% endblock %}", "{% set x = m.content.split(', ')[0] %}{{ x }}", "{% set x = [] %}{% set x = x + [1] %}{{ x }}", "{{ m.content[:5] ~ '...' }}",
    "{{ m.content.split('l')[-1].lstrip() }}", "{{ (m.content|trim).split(' ')|last }}", "{{ messages|length }}", "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list }}", "{{ messages[1:]|map(attribute='role')|join }}", "{{ messages[-1].role }}", "{{ messages|map(attribute='role')|unique|list }}", "{{ tools }}", "{{ tools is none }}", "{{ documents is none }}", "{{ bos_token }}", "{{ add_generation_prompt }}", "{{ strftime_now('%d') is string }}",
    "{{ u.x is defined }}", "{{ m.missing.x is defined }}", "{{ m.missing.x|default('a') }}", "{{ m.none.x is defined }}", "{{ (m.none or {}).x is defined }}", "{{ m.map.list[1] is defined }}", "{{ m.map.list[9] is defined }}", "{% for x in m.map.list[9] %}{% endfor %}x", "{% for m2 in messages %}{% for c in m2.tool_calls %}{{ c }}{% endfor %}{% endfor %}x", "{% for x in m.none|default([], true) %}{% endfor %}x", "{% for x in m.none if m.none is not none else [] %}{% endfor %}x",
    "{% for x in (m.none if m.none is not none else []) %}{% endfor %}x", "{% for x in m.list[:2] %}{{ x }}{% endfor %}", "{% for x in m.list|reverse %}{{ x }}{% endfor %}", "{% for x in m.nested|groupby('k') %}{{ x.grouper }}:{{ x.list|length }};{% endfor %}", "{% for k, v in m.nested|groupby('k') %}{{ k }}{{ v|length }}{% endfor %}", "{% for x in range(3) %}{{ x }}{% endfor %}", "{% for x in m.spaced.split() %}{{ x }};{% endfor %}", "{% for x in dict(a=1) %}{{ x }}{% endfor %}",
    "{% for x in m.map|dictsort %}{{ x[0] }}{% endfor %}", "{% set m = none %}{% for x in m %}{% endfor %}", "{{ [1, 2, 3]|sum / 2 }}", "{{ m.role == 'user' and m.content or 'x' }}", "{{ '%s: %s' % (m.role, m.content) }}", "{{ ('a' if m.yes else 'b') ~ 'c' }}", "{{ 1 if u else 2 }}", "{{ u if u is defined else 'x' }}", "{{ [] is sequence }}{{ {} is mapping }}", 
]

# Values that lack an order, that are in nothing, or that are undefined where a function takes them.
SIBLINGS = [
    "none in 'abc'", "u in m.content", "m.list in 'abc'", "u in u", "u in m.map", "m.list in m.map", "m.map in m.map", "1 in m.none", "1 in 5", "'a' in 5", "u in m.list", "u not in 'abc'", "1 not in 'abc'", "'a' not in u", "'b' not in 'abc'", "not 'a' in 'abc'",
    "'a' in m.map.keys()", "u in range(3)", "1 in range(3)", "'a' ~ 'b' in 'abc'", "1 + 2 in [3]", "'a' in 'abc' and 'x' not in 'abc'", "'a' in 'abc' in [true]", "'a' in m.words|join", "m.content[0] in 'H'", "(1, 2) in [(1, 2)]", "1 is in 'abc'", "u is in 'abc'", "5 is in u", "none is in 'a'",
    "'a' in 'abc' == true", "'x' if 'a' in 'abc' else 'y'", "{'a': 'a' in 'abc'}", "['a' in 'abc', u not in [1]]", "-1 in [-1]", "not 1 not in [1]", "m.words|select('in', 'abc')|list", "m.list|select('in', 'abc')|list", "m.nested|selectattr('k', 'in', 'xyz')|list|length", "m.nested|selectattr('n', 'in', 'xyz')|list|length", "m.nested|rejectattr('n', 'in', [1])|list|length",
    "m.nested|sort(attribute='k,n')", "m.nested[:2]|sort(attribute='k,n')|map(attribute='n')|list", "m.nested|sort", "[1, 'a']|sort", "[none, 1]|sort", "[none]|sort", "[u, u]|sort", "[u]|sort", "[[2, 'a'], [1, none]]|sort", "[[1, 'a'], [1, none]]|sort", "[[1], [1, none]]|sort", "[true, 0]|sort", "[(1, 2), (1, 1)]|sort", "[(1, 2), [1, 1]]|sort",
    "m.nested|max(attribute='n')", "m.nested|min(attribute='n')", "m.nested|sum(attribute='n')", "m.nested|sum(attribute='k')", "[1, 'a']|max", "['a', none]|min", "[none]|max", "['b', 'A']|max", "['b', 'A']|min", "m.words|sum", "m.nested|groupby('n')", "m.nested|groupby('missing')", "[m.nested[2]]|groupby('n')|length", "m.nested|groupby('n', default=u)",
    "m.nested|unique(attribute='n')|list|length", "m.nested|unique|list", "[[1]]|unique|list", "[u, u]|unique|list|length", "{1: 2, 'a': 3}|dictsort", "{'a': 1, 'b': 'x'}|dictsort(by='value')", "{none: 1, 'a': 2}|dictsort", "{'a': none, 'b': none}|dictsort", "{'a': none}|dictsort(by='value')", "{'a': none, 'b': none}|dictsort(by='value')", "m.nested|join(', ', attribute='n')", "m.nested|map(attribute='n')|sum", "m.nested|map(attribute='n')|join(',')", "m.nested|map(attribute='n')|max",
    "m.nested|selectattr('n', 'gt', 1)|list", "m.nested|rejectattr('n', 'lt', 5)|list", "m.nested|selectattr('n', 'eq', 1)|list", "m.list|sort(attribute='x')", "m.list[:1]|sort(attribute='x')", "m.nested|sort(attribute='k', reverse=true)|map(attribute='k')|list", "['b', 'A', 'a']|sort", "['b', 'A', 'a']|sort(case_sensitive=true)", "m.nested[:2]|sort(true, attribute='n')|map(attribute='n')|list",
    "u|center(3)", "u|wordwrap(3)", "u|striptags", "u|string|length", "u|slice(2)|list", "u|map(attribute='x')|list", "u|rejectattr('x')|list", "u|count", "u is divisibleby 3", "u is even", "u is sameas u", "u is callable", "u is lower", "u is upper", "u is boolean", "u is float", "u is integer", "u is false", "u is ne 1", "u is gt 1", "u[u]", "'a'[u]", "m.list[u:]", "m.list[:u]", "m.list[::u]", "'abc'[u:]",
    "'a' * u", "u * 'a'", "[1] + u", "u + [1]", "{u: 1}", "dict(u)", "dict(a=u)", "namespace(a=u).a", "range(1, u)", "'a'.split('a', u)", "'a'.strip(u)", "'a'.lstrip(u)", "'a'.endswith(u)", "'a'.find(u)", "'a'.index(u)", "'a'.count(u)", "'a'.zfill(u)", "'a'.center(u)", "'a'.ljust(u)", "'a'.removeprefix(u)", "'a'.partition(u)", "'a'.join([u])", "'a'.join(['a', u])", "'a'.replace('a', u)", "'a'.replace('a', 'b', u)",
    "'%d' % u", "'%s' % (u,)", "'a'|replace(u, 'b')", "'a'|replace('a', u)", "'a'|trim(u)", "m.list|join(u)", "m.list|batch(u)|list", "m.content|truncate(u)", "m.content|indent(u)", "m.content|center(u)", "m.content|wordwrap(u)", "5.5|round(u)", "m.list|sum(start=u)", "m.map|tojson(indent=u)", "m.map|tojson(separators=u)", "m.list|sort(reverse=u)", "m.nested|map(attribute=u)|list", "m.nested|selectattr(u)|list", "m.map.get('x', u)",
    "m.list.index(u)", "m.list.count(u)", "cycler(u).next()", "joiner(u)() ~ 'x'", "strftime_now(u)", "u ~ u", "u and u", "u or u", "u == none", "u == ''", "u == false", "u < u", "1 < u < 3", "[u] < [u]", "[1, u] == [1, u]", "u.x|default('a')", "m.list|map(u)|list", "m.list|select(u)|list", "'5'|int(u)", "'x'|int(u)", "'x'|float(u)", "u|default(u)", "m.none|default(u, true)", "m.list|default(u)", "u|d", "'a' if u else u", "range(3)[u]", "m.content.startswith(u)", "m.list|length is gt u", "m.list|first in u", "loop", "self", "caller",
    "m.content|wordwrap", "'a b\nc  d e'|wordwrap(3)", "'aaaa bb'|wordwrap(3)", "'aaaa bb'|wordwrap(3, false)", "'a-b-c d'|wordwrap(3)", "'a-b-c d'|wordwrap(3, true, '|', false)", "m.content|wordwrap(6, wrapstring='|')", "''|wordwrap(5)", "'  a b'|wordwrap(3)", "'a\n\nb c'|wordwrap(2)", "'a\tb c'|wordwrap(3)", "'é é é'|wordwrap(3)", "'ab'|wordwrap(0)", "'ab'|wordwrap(break_long_words=false, width=1)", "5|wordwrap(2)", "none|wordwrap(2)",
    "'/a?b=c d'|urlencode", "'ü/é'|urlencode", "{'a': 1, 'b c': 'x/y'}|urlencode", "[('a', 1), ('b', 'é')]|urlencode", "5|urlencode", "none|urlencode", "m.list|urlencode", "'~-._'|urlencode", "'a+b%'|urlencode", "{}|urlencode", "{'a': none}|urlencode", "{'a': ' '}|urlencode", "true|urlencode",
    "'<p>a <b>b</b>\n c</p>'|striptags", "'a<!-- x > y -->b'|striptags", "'a &amp; b &lt;c&gt;'|striptags", "'a < b'|striptags", "'a <b'|striptags", "'<<a>>'|striptags", "5|striptags", "none|striptags", "'<a href=\">\">x'|striptags", "'&eacute;&#233;&#x41;&nbsp;x'|striptags", "'<!-- a'|striptags",
    "'a\tb\n\tc'.expandtabs()", "'a\tb'.expandtabs(0)", "'a\tb'.expandtabs(-1)", "'\t'.expandtabs(tabsize=2)", "'é\tb'.expandtabs(3)", "''.expandtabs()", "'a\n\tb'.expandtabs(4)", "'\ta'.expandtabs(1)", "'a'.expandtabs(u)", "'a'.expandtabs('b')",
    "'%r' % none", "'%r' % true", "'%r' % 1.0", "'%r' % [1, 'a']", "'%r' % {'a': 'b'}", "'%r' % 'it\\'s'", "'%r and %s' % ('a', 'b')", "'%r' % ('a',)", "'%5r|' % 'a'", "'%.2r' % 'abc'", "'%r' % u", "'%r' % m.unicode", "'%r' % '\\n'", "'%a' % 'é'", "'%r'|format('a')", "'%(x)r' % {'x': 'a'}", "'%%r' % ()", "'%-6r|' % 'a'", "'%r' % 1e16", "'%r' % ((1, 'a'),)", "'%r' % 'say \"x\"'", "'%r' % m.big",
]
SIBLING_STATEMENTS = [
    "{% if u in 'abc' %}a{% endif %}", "{% if 1 in 'abc' %}a{% endif %}", "{% for x in m.list if x in [1] %}{{ x }}{% endfor %}", "{% for x in m.list if x in 'abc' %}{{ x }}{% endfor %}", "{% for x in [1, 'a'] if x is string and x in 'abc' %}{{ x }}{% endfor %}", "{% set x = u in 'abc' %}", "{% set x = 'a' in 'abc' %}{{ x }}",
    "{% for x in ('a' in 'abc', 1) %}{{ x }}{% endfor %}", "{% for x in m.list if x not in [1] %}{{ x }}{% endfor %}", "{% for x in m.list recursive %}{% if x in [3] %}{{ x }}{% endif %}{% endfor %}", "{% if 'a' in 'abc' or 1 in 'abc' %}a{% endif %}", "{% if not ('a' in 'abc') %}a{% elif 'b' in 'abc' %}b{% endif %}", "{% if m.content is defined and 'Hello' in m.content and 'x' not in m.content %}a{% endif %}",
    "{% if 'tool_calls' in m %}a{% elif 'role' in m %}b{% endif %}", "{% if ('a' in m.map) and not 'x' in m.map %}a{% endif %}", "{% set m.x = 1 in 'abc' %}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f('a' in 'abc') }}{{ f(a='x' not in 'abc') }}", "{% for x in m.nested|sort(attribute='n') %}{{ x.k }}{% endfor %}", "{% for x in m.nested if x.n in [1] %}{{ x.k }}{% endfor %}", "{% if '</think>' in m.content %}{% set c = m.content.split('</think>')[-1] %}{% endif %}{{ c }}",
    "{% for k, v in {'a': 1}.items() if k in ['a'] %}{{ k }}{{ v }}{% endfor %}", "{% call(x) f() %}{% endcall %}", "{% filter wordwrap(3) %}a b c d{% endfilter %}", "{{ 'a' in\n'abc' }}", "{{ m.none not in 'abc' }}", "{% if 'a' not\n in 'abc' %}x{% endif %}", "{{ 'a'in'abc' }}", "{{ u in (['a'] if m.yes else 'abc') }}", "{{ 'a' in 'abc' if m.yes }}", "{{ (u in 'abc') if m.no else 'ok' }}",
]


def render(snippet):
    try:
        return chat_template_utils._compile_jinja_template(snippet).render(
            messages=json.loads(MESSAGES), tools=None, documents=None, add_generation_prompt=False, bos_token="<s>"
        )
    except Exception:
        return None


def main():
    expressions = [f"{{{{ {expression} }}}}" for expression in JSON + UNDEFINED + NONE + TYPES + STRINGS + LISTS + SIBLINGS]
    snippets = ["{% set m = messages[0] %}" + snippet for snippet in expressions + STATEMENTS + SIBLING_STATEMENTS]
    cases = [{"snippet": snippet, "text": render(snippet)} for snippet in dict.fromkeys(snippets)]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    path = HERE / "snippets.json"
    path.write_text(f'{{"messages": {json.dumps(MESSAGES)}, "cases": [\n{lines}\n]}}\n')


main()
