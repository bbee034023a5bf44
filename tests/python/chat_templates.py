"""Chat templates in the shapes that models have, and pieces of Jinja, for comparison with jinja2."""

TEMPLATES = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
""",
    "chatml-default-system": """{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou weave short answers.<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content | trim) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
    "llama2": """{%- if messages[0]['role'] == 'system' -%}
  {%- set rules = '<<SYS>>\\n' ~ messages[0]['content'].strip() ~ '\\n<</SYS>>\\n\\n' -%}
  {%- set turns = messages[1:] -%}
{%- else -%}
  {%- set rules = '' -%}
  {%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
  {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Turns of user and assistant must take turns.') -}}
  {%- endif -%}
  {%- set text = rules ~ turn['content'] if loop.first else turn['content'] -%}
  {%- if turn['role'] == 'user' -%}
    {{- bos_token ~ '[INST] ' ~ text.strip() ~ ' [/INST]' -}}
  {%- elif turn['role'] == 'assistant' -%}
    {{- ' ' ~ text.strip() ~ ' ' ~ eos_token -}}
  {%- endif -%}
{%- endfor -%}""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}
{%- set ns = namespace(index=0, system='') -%}
{%- for message in messages if message.role == 'system' -%}
{%- set ns.system = ns.system ~ message.content ~ '\\n\\n' -%}
{%- endfor -%}
{%- for message in messages | rejectattr('role', 'equalto', 'system') -%}
  {%- if (message['role'] == 'user') is not sameas (ns.index % 2 == 0) -%}
    {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') -}}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {%- if loop.last and ns.system -%}
      {{- '[INST] ' ~ ns.system ~ message.content ~ '[/INST]' -}}
    {%- else -%}
      {{- '[INST] ' ~ message.content ~ '[/INST]' -}}
    {%- endif -%}
  {%- else -%}
    {{- ' ' + message['content'] + eos_token -}}
  {%- endif -%}
  {%- set ns.index = ns.index + 1 -%}
{%- endfor %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "gemma": """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
{{ raise_exception('This one knows no system.') }}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'assistant') %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}
{% endfor %}
{% if add_generation_prompt %}
{{'<start_of_turn>model
'}}{% endif %}
""",
    "parts": """{%- macro said(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}{{ raise_exception('content of an unknown kind') }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
### {{ m.role | capitalize }}{% if m.name is defined %} ({{ m['name'] }}){% endif %}:
{{ said(m.content) | trim }}
{% endfor -%}
{%- if add_generation_prompt %}
### Assistant:
{% endif -%}""",
    "tools": """{%- set tools = tools if tools is defined and tools is not none else [] -%}
{%- if tools | length > 0 -%}
{{- '# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}
{%- else -%}{{- '# No tools\\n' -}}{%- endif -%}
{%- for role, group in {'user': 'U', 'assistant': 'A', 'system': 'S'}.items() -%}
{{ group }}={{ messages | selectattr('role', 'eq', role) | map(attribute='content') | list | tojson(indent=2) }};
{%- endfor -%}
{%- set last = (messages | last).content -%}
{{ last[:5] ~ '|' ~ last[::-1] ~ '|' ~ last[-3:] }}""",
    "thinking": """{%- set ns = namespace(last=-1) -%}
{%- for m in messages[::-1] -%}
  {%- set index = (messages | length - 1) - loop.index0 -%}
  {%- if ns.last < 0 and m.role == 'user' and not(m.content.startswith('<reply>') and m.content.endswith('</reply>')) -%}
    {%- set ns.last = index -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and '</think>' in m.content -%}
    {%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
    {{- '<A' ~ (' late' if loop.index0 > ns.last else '') ~ '>' ~ content ~ '[' ~ thought ~ ']' -}}
  {%- else -%}
    {{- '<' ~ m.role[0] | upper ~ '>' ~ m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<A>' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}<think></think>{%- endif -%}
{%- endif -%}""",
    "whitespace": """  {# a remark #}
{%- raw -%} {{ not this }} {% endraw %}
   {% for m in messages +%}
   {{ m.role }}
     {%+ if loop.last %}
  last
     {% else %}
  more {{- '   ' -}} still
     {% endif %}
   {% endfor %}
  tail	{% if true %}x{% endif %}

""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}""",
    "filters": """{%- for m in messages if m.role != 'system' -%}
{%- set words = m.content.split() -%}
{{ loop.index }}/{{ loop.length }} {{ words | map('upper') | join('-') }} {{ words | map('length') | sum }}
{{- words | select('in', ['the', 'of']) | list }} {{ m | items | list }} {{ m.content | replace('e', '3', 2) | title }}
{{ m.content | default('none', true) }} {{ words | first }}{{ words | last }} {{ words | sort | unique | list }} {{ m.content | length }}
{% endfor -%}""",
    "blocks": """{%- set greeting %}Dear {{ messages[-1].role }}{% endset -%}
{%- set bullets | trim | upper %}  {% for m in messages %}* {{ m.role }} {% endfor %}  {% endset -%}
{{ greeting }}/{{ bullets }}/{% filter lower %}LOUD {{ greeting }}{% endfilter %}
{%- macro field(name, value='?', width=6) %}[{{ name }}={{ value }}{{ ' ' * (width - value | string | length) }}]{% endmacro -%}
{{ field('a') }}{{ field('b', 3) }}{{ field(width=4, name='c', value=none) }}
{%- for n in range(2, 9, 3) %}{{ n if n is even else n / 2 }},{{ n // 2 }},{{ n ** 2 }};{% else %}nothing{% endfor -%}
{%- for n in [] %}x{% else %} empty{% endfor %}""",
}

CONVERSATIONS = {
    "one": [{"role": "user", "content": "  How many heads has a loom?\n"}],
    "turns": [
        {"role": "user", "content": "How many heads?"},
        {"role": "assistant", "content": "<think>\nlooms, heads\n</think>\n\n Eight of the best. "},
        {"role": "user", "content": "And of the weaver's \"own\" & <others>?\tÄÖÜ ß 😀"},
    ],
    "system": [
        {"role": "system", "content": " Speak of weaving only. "},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "<reply>the thread</reply>"},
    ],
    "wrong": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "parts": [
        {"role": "user", "name": "Ada", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]},
    ],
}

# Each is rendered by itself with NAMES.
NAMES = {
    "text": "  The Quick brown\tfox's \"tail\"\n jumps ",
    "word": "Straße",
    "numbers": [3, 1, 2.5, 10],
    "mixed": [1, "1", 1.0, True, None, [1, "a'b"], {"k": "v"}],
    "table": {"b": 1, "a": [1, 2], "C": None},
    "people": [{"name": "Ada", "age": 36}, {"name": "bob", "age": 4}, {"name": "Cy"}],
    "empty": "",
    "nothing": None,
}
PIECES = [
    # What is there without being given.
    "{{ tools is none }} {{ documents is defined }} {{ pad_token }} {{ unk_token is defined }} {% if tools %}some{% endif %}",
    "{{ 1 + 2 * 3 - 4 // 3 % 5 ** 2 / 7 }}",
    "{{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 // -2 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 7 / 2 }} {{ 1e3 }} {{ 1_000 }}",
    "{{ 1e16 }} {{ 1.5e-7 }} {{ 123456789.125 }} {{ 0.1 + 0.2 }} {{ 100000.0 * 10 }} {{ 1e15 }} {{ 1e22 }}",
    "{{ 'a' 'b' ~ 1 ~ none ~ true ~ 1.0 }}",
    "{{ \"tab\\t\\x41\\u00e9\\\\ \\'\\\"\" }}{{ 'a\\qb' }}{{ '\\101' }}",
    "{{ mixed }} {{ table }} {{ people[0] }} {{ (1, 'x') }} {{ (1,) }} {{ [] }} {{ {} }} {{ () }}",
    "{{ 1 == true }} {{ 1 == 1.0 }} {{ '1' == 1 }} {{ none == false }} {{ [1] == [1.0] }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }}",
    "{{ 'x' if empty }}|{{ 'x' if text else 'y' }}|{{ (1 if false else 2) if true else 3 }}",
    (
        "{{ empty or 'or' }} {{ text and 'and' }} {{ not empty }} {{ not 1 == 2 }} {{ 1 in [1, 2] }} {{ 3 not in [1] }} "
        "{{ 'a' in 'cat' }} {{ 'b' in table }} {{ not 'z' in table }}"
    ),
    "{{ text.strip() }}|{{ text.lstrip() }}|{{ text.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ text | trim }}",
    (
        "{{ text.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,,c'.split(',', 1) }} {{ 'a b  c d'.split(none, 2) }} "
        "{{ 'a,b,c'.rsplit(',', 1) }} {{ ' a b  c '.rsplit(none, 1) }}"
    ),
    (
        "{{ word.upper() }} {{ word | lower }} {{ 'hELLO wORLD' | capitalize }} {{ 'hELLO wORLD-x' | title }} "
        "{{ 'it is' | title }} {{ word | length }} {{ word[4] }} {{ word[-2:] }} {{ word[::2] }}"
    ),
    "{{ numbers[1:3] }} {{ numbers[:-1] }} {{ numbers[::-1] }} {{ numbers[5:] }} {{ numbers[-10:2] }} {{ numbers[3:0:-2] }}",
    (
        "{{ numbers | sort }} {{ numbers | max }} {{ numbers | min }} {{ numbers | sum }} {{ numbers | first }} "
        "{{ numbers | last }} {{ numbers | length }} {{ numbers | reverse | list }}"
    ),
    (
        "{{ ['b', 'A', 'c', 'a'] | sort }} {{ ['b', 'A', 'c', 'a'] | sort(reverse=true) }} {{ ['b', 'A', 'a'] | unique | list }} "
        "{{ ['b', 'A'] | sort(case_sensitive=true) }}"
    ),
    (
        "{{ people | map(attribute='name') | join(', ') }} {{ people | map(attribute='age', default='?') | list }} "
        "{{ people | selectattr('age', 'defined') | map(attribute='name') | list }}"
    ),
    (
        "{{ people | sort(attribute='name') | map(attribute='name') | list }} {{ people | rejectattr('age') | list }} "
        "{{ people | selectattr('name', 'in', ['Ada']) | list | length }}"
    ),
    "{{ numbers | select('gt', 2) | list }} {{ numbers | reject('odd') | list if false else '' }} {{ [0, 1, '', 'a'] | select | list }}",
    (
        "{{ missing }}|{{ missing is defined }}|{{ missing | default('d') }}|{{ table.x is undefined }}|"
        "{{ table.x | default('e') }}|{{ empty | default('f', true) }}|{{ empty | d('g', boolean=true) }}"
    ),
    (
        "{% if missing %}a{% elif not missing %}b{% endif %}{% for x in missing %}x{% else %}none{% endfor %}"
        "{{ missing | length }}{{ missing | list }}"
    ),
    (
        "{{ table | tojson }} {{ mixed | tojson }} {{ text | tojson }} {{ word | tojson }} {{ table | tojson(indent=2) }} "
        "{{ [] | tojson(indent=1) }} {{ {} | tojson }} {{ table | tojson(sort_keys=true) }}"
        "{{ 'é\u007f\U0001f600\\n' | tojson(ensure_ascii=true) }} {{ 'é\u007f\U0001f600' | tojson }} "
        "{{ table | tojson(separators=(',', ':')) }} {{ mixed | tojson(indent='\\t', separators=[';', '=']) }} "
        "{{ mixed | tojson(indent=0) }} {{ mixed | tojson(indent=-3) }}"
    ),
    (
        "{{ table.items() | list }} {{ table.keys() | list }} {{ table.values() | list }} {{ table | dictsort }} "
        "{{ table.get('b') }} {{ table.get('z') }} {{ table.get('z', 4) }} {{ table['a'][1] }} {{ table.a.0 }}"
    ),
    (
        "{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %}{% for k in table %}{{ k }}{% endfor %}{% for c in word %}"
        "{{ c }}.{% endfor %}"
    ),
    (
        "{% for x in numbers %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}"
        "{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }} {% endfor %}"
        "{% for x in [1, 1, 'a', 'a', 1] %}{{ loop.depth }}{{ loop.depth0 }}{{ loop.changed(x) }}"
        "{% for y in [x] %}{{ loop.depth }}{{ loop.changed(x, y) }}{% endfor %}{{ loop.changed() }}{% endfor %}"
    ),
    (
        "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 9 %}"
        "{% endif %}{{ x }}"
    ),
    (
        "{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a * 5 %}{% set ns.b = i %}{% endfor %}{{ ns.a }}"
        "{{ ns.b }}{{ ns.c is defined }}"
    ),
    (
        "{% for i in range(9) if i % 2 %}{% if i == 5 %}{% continue %}{% endif %}{% if i == 7 %}{% break %}{% endif %}{{ i }}"
        "{{ loop.index }}{{ loop.length }} {% endfor %}"
    ),
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% for (x, y) in [(1, 2), (3, 4)] %}{{ x }}{{ y }}{% endfor %}{% set t = 1, %}{{ t }}",
    "{% macro m(a, b=2) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }}{{ m(b=3, a='x') }}{% set c = 5 %}{{ m() }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(4) }}",
    (
        "{{ '%s' | length }} {{ 'a' * 3 }} {{ 2 * [1] }} {{ [1] + [2] }} {{ 'x' + 'y' | upper }} {{ -1 | abs }} {{ (-1) | abs }} "
        "{{ 3 - 1 | abs }}"
    ),
    (
        "{{ text | replace('o', '0') }} {{ text.replace('o', '0', 1) }} {{ 'aXb' | replace('X', '') }} "
        "{{ 'ab' | replace('', '-') }} {{ 'a\\nb' | indent }} {{ 'a\\nb\\n\\nc' | indent(2, true) }}"
        "{{ 'a\\r\\nb\\x0bc\\u2028\\n' | indent }}|{{ '' | indent(1, true) }}|{{ '\\n' | indent(1, true, true) }}"
    ),
    (
        "{{ 1 is number }} {{ 1 is integer }} {{ 1.0 is float }} {{ true is number }} {{ true is integer }} "
        "{{ true is boolean }} {{ 'a' is string }} {{ [] is sequence }} {{ {} is mapping }} {{ 'a' is iterable }} "
        "{{ 1 is iterable }} {{ none is none }} {{ nothing is not none }} {{ {} is iterable }}"
    ),
    (
        "{{ 3 is odd }} {{ 3 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 'a' is eq 'a' }} {{ 1 is lt 2 }} "
        "{{ 'a' is in ['a'] }} {{ true is true }} {{ 1 is true }} {{ 'AB' is upper }} {{ 'ab' is lower }} {{ 1 is lower }} "
        "{{ '' is upper }} {{ 'a1' is lower }} {{ 'aB' is lower }} {{ raise_exception is callable }}"
    ),
    (
        "{{ '12' | int + 1 }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ '3.9' | int }} {{ 3.9 | int }} {{ '2.5' | float }} "
        "{{ 'x' | float(1.5) }} {{ 2.567 | round(1) }} {{ 2.675 | round(2) }} {{ 10 | round }} {{ 7 | round(1) }} "
        "{{ -1.5e300 | round(9) }} {{ 2.5 | round }} {{ 3.5 | round }} {{ 2.1 | round(0, 'ceil') }} {{ 5 | string ~ 6 }}"
    ),
    (
        "{{ 'a<b' | e }} {{ 'x' | safe }} {{ 'one two' | wordcount }} {{ 'its-3.5, ß_a - é²' | wordcount }} "
        "{{ people[0] | attr('name') }} {{ people | map('length') | list }} {{ people | sum(attribute='x') if false }}"
    ),
    (
        "{{ [[1, 2], [3]] | map('first') | list }} {{ ['a ', ' b'] | map('trim') | list }} "
        "{{ ['x', 'y'] | map('replace', 'x', 'z') | join }} {{ numbers | join('+') }} {{ people | join('/', attribute='name') }}"
    ),
    (
        "{{ 'abc'.startswith('a') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abcabc'.find('c') }} {{ 'abc'.find('z') }} "
        "{{ 'abcabc'.rfind('b') }} {{ 'aaa'.count('a') }} {{ 'a\\nb\\r\\nc'.splitlines() }} {{ ','.join(['a', 'b']) }} "
        "{{ 'a\\u2028b\\x0bc\\r\\n\\nd\\r'.splitlines() }} {{ '\u0663'.isdigit() }} {{ '\u00b2'.isdigit() }} {{ '\u00bd'.isdigit() }} "
        "{{ '\u00bd'.isnumeric() }} {{ ''.isnumeric() }} {{ '\u0130X'.lower() | length }} "
        "{{ '12'.isdigit() }} {{ ' '.isspace() }} {{ 'prefix'.removeprefix('pre') }} {{ [1, 2, 1].count(1) }} "
        "{{ [1, 2].index(2) }}"
    ),
    (
        "{{ dict(a=1, b=2) }} {{ range(3) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }} {% for i in range(3) %}"
        "{{ i }}{% endfor %}"
    ),
    (
        "{{ (people | selectattr('name', 'eq', 'nobody')) and 'generators are true' }} "
        "{{ people | selectattr('name', 'eq', 'nobody') | list and 'x' }}"
    ),
    "{{ {'a': {'b': [1, {'c': 2}]}}.a.b[1].c }} {{ {'a': 1,}.a }} {{ [1, 2,][1] }} {{ {}['x'] }}|{{ [][0] }}|{{ 'abc'[1] }}{{ 'abc'[7] }}",
    "{{- ' a ' -}}  {{ 'b' }}  {%- if true -%}  c  {%- endif -%}  d {#- remark -#}  e",
    "a\n{% if true %}\nb\n{% endif %}\nc\n\n{{ 1 }}\n\n  {% set x = 1 %}  \n d {% set y = 2 %}\ne",
    "{%- if true +%}\n x\n{%- endif %}\n  {%+ if true %}y{% endif +%}\nz\r\nw\r\n",
    "{% raw %}\n{{ x }} {% if %}\n{% endraw %}\nq{% raw -%}   r   {%- endraw -%}   s",
    (
        "{% filter upper %}a{{ word }}{% endfilter %}{% set b | replace('a', 'o') %}banana{% endset %}{{ b }}{% set c %}"
        "{% set inner = 1 %}x{% endset %}{{ c }}{{ inner is defined }}"
    ),
    # Errors in both.
    "{{ missing.x }}",
    "{{ missing + 1 }}",
    "{{ 'a' + 1 }}",
    "{{ 1 / 0 }}",
    "{{ 'a' < 1 }}",
    "{{ [].append(1) }}",
    "{{ nothing.x.y }}",
    "{% for x in 3 %}{% endfor %}",
    "{{ text() }}",
    "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}",
    "{{ 1 | length }}",
    "{{ people | selectattr('name') | length }}",
    "{{ missing() }}",
    "{{ range(1000000) | list }}",
]
# What templates may have and this interpreter has not: the construct is named.
UNSUPPORTED = {
    "{% include 'x' %}": "the block 'include' is not supported",
    "{% call f() %}{% endcall %}": "the block 'call' is not supported",
    "{{ [1, 2] | groupby('x') }}": "the filter 'groupby' is not supported",
    "{{ 1 is filter }}": "the test 'filter' is not supported",
    "{{ '%s' % 1 }}": "'%' on a text is not supported",
    "{{ f(*[1]) }}": "arguments unpacked with '*' are not supported",
    "{% for x in [] recursive %}{% endfor %}": "'recursive' is not supported",
}
# A template cannot hang the server or take its memory.
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{{ 'x' * 9999999999 }}",
    "{{ [0] * 9999999999 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns.me | tojson }}{{ ns.me == [ns] }}",
    "{{ 'a' | replace('', 'x' * 99999) | replace('', 'x' * 99999) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ 1" + " + 1" * 5000 + " }}",
    "{{ x" + "[0]" * 5000 + " }}",
    "{% if 1 %}" * 5000,
    "{{ " + "not " * 5000 + "1 }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ 2 ** 99999999999 }}",
    # Parts that are held many times.
    "{% set ns = namespace(l=[0]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l={'a': 'x' * 99}) %}{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}",
    "{{ [['x' * 9999999] * 99999] }}",
    "{% set l = ['x' * 9999999] %}{% set m = ['x' * 9999999] %}{% for i in range(99999) %}{{ l == m }}{{ l < m }}{% endfor %}",
    "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ -1 in l }}{% endfor %}",
    "{{ [[[[1, 2]] * 99999] * 9] | tojson(indent=100) }}",
    "{{ ([1] * 99999) | tojson(separators=['x' * 9999, ':']) }}",
]
