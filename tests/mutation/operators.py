# SPDX-License-Identifier: Apache-2.0

"""The small changes that are made to a source file, in C and in Python.

Both languages go through the same walk over a syntax tree of tree-sitter, so
that each change is one of an expression or a statement, and nearly all of them
compile. Messages, logging, assertions, types and code outside of functions are
left alone.
"""

import collections.abc
import dataclasses
import functools
import itertools
import re

import tree_sitter
import tree_sitter_c
import tree_sitter_python

RELATIONS = {'<': '<=', '<=': '<', '>': '>=', '>=': '>', '==': '!=',
             '!=': '==', 'in': 'not in', 'not in': 'in', 'is': 'is not',
             'is not': 'is'}
LOGIC = {'&&': '||', '||': '&&', 'and': 'or', 'or': 'and'}
ARITHMETIC = {'+': '-', '-': '+', '*': '/', '/': '*', '//': '*', '%': '*',
              '|': '&', '&': '|', '<<': '>>', '>>': '<<', '^': '|',
              '++': '--', '--': '++', '+=': '-=', '-=': '+=', '|=': '&=',
              '&=': '|='}
# A crash or another process depends on these.
SYNC = re.compile(r'(sync|lock|fence|(?<!re)lease|exclude|flush)\w*$')
ORDERED = re.compile(
    r'env->(?!release|start_)|(sync|lock|link|write|rename|replace|publish|'
    r'commit|flush|advance|exchange|exclude|fence|(?<!re)lease|admit)\w*\(')
# Calls that only report: their arguments are no behaviour.
TALK = re.compile(r'(gd_fail(_errno)?|\w*printf|LOG\.\w+|log\.\w+|_log\.\w+|'
                  r'warnings\.warn|(_?static_)?assert|abort|print)$', re.I)
STATUS = re.compile(r'(s|rc|status|result)$')

CALLS = ('call_expression', 'call')
FUNCTIONS = ('function_definition',)
LISTS = ('compound_statement', 'block')
CONDITIONAL = ('if_statement', 'while_statement', 'do_statement',
               'elif_clause', 'for_statement', 'conditional_expression')
# A line's coverage is that of a child of one of these.
OUTER = (*LISTS, *FUNCTIONS, 'if_statement', 'while_statement',
         'do_statement', 'for_statement', 'else_clause', 'elif_clause',
         'with_statement', 'try_statement', 'except_clause',
         'finally_clause', 'switch_statement', 'case_statement')
EXEMPT = ('array_declarator', 'enum_specifier', 'type', 'parameters',
          'decorator', 'assert_statement', 'static_assert_declaration',
          'sizeof_expression')


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One small change of one file."""

    id: str
    """``FILE:LINE:COLUMN:OPERATOR.NUMBER``; holds until the file changes."""
    file: str
    operator: str
    start: int
    end: int
    new: str
    """What is put in place of the bytes from `start` to `end`."""
    lines: tuple[int, int]
    """The first and the last line that must be executed to notice it."""

    def apply(self, text: bytes) -> bytes:
        return text[:self.start] + self.new.encode() + text[self.end:]


_Change = tuple[str, tree_sitter.Node, int, int, str]


@functools.cache
def _parser(suffix: str) -> tree_sitter.Parser:
    grammar = tree_sitter_c if suffix == 'c' else tree_sitter_python
    return tree_sitter.Parser(tree_sitter.Language(grammar.language()))


def _text(node: tree_sitter.Node) -> str:
    return node.text.decode()


def _callee(node: tree_sitter.Node) -> str:
    return _text(node.child_by_field_name('function'))


def _lines(node: tree_sitter.Node) -> tuple[int, int]:
    while node.parent is not None and node.parent.type not in OUTER:
        node = node.parent
    return node.start_point.row + 1, node.end_point.row + 1


def _negations(node: tree_sitter.Node, is_c: bool
               ) -> collections.abc.Iterator[_Change]:
    condition = node.child_by_field_name('condition')
    if condition is None and node.type == 'conditional_expression':
        condition = node.named_children[1]
    if condition is None:
        return
    inner = condition
    while inner.type == 'parenthesized_expression':
        inner = inner.named_children[0]
    operators = {child.type for child in inner.children}
    if not operators & {'==', '!=', 'in', 'not in', 'is', 'is not', 'not'}:
        yield ('negate', condition, inner.start_byte, inner.end_byte,
               f'!({_text(inner)})' if is_c else f'not ({_text(inner)})')


def _tokens(node: tree_sitter.Node) -> collections.abc.Iterator[_Change]:
    """Yield changes of operators and constants."""
    if node.type in ('binary_expression', 'binary_operator',
                     'boolean_operator', 'comparison_operator',
                     'update_expression', 'assignment_expression',
                     'augmented_assignment'):
        if node.children[0].type == 'string':
            return
        for child in node.children:
            for name, table in (('relation', RELATIONS), ('logic', LOGIC),
                                ('arithmetic', ARITHMETIC)):
                if child.type in table:
                    yield (name, child, child.start_byte, child.end_byte,
                           table[child.type])
    elif node.type in ('number_literal', 'integer'):
        match = re.fullmatch(r'(0[xX][\da-fA-F]+|\d+)([uUlL]*)', _text(node))
        if match is not None:
            value = int(match[1], 0 if match[1][:2].lower() == '0x' else 10)
            for other in (value + 1, value - 1)[:2 if value else 1]:
                yield ('constant', node, node.start_byte, node.end_byte,
                       f'{other}{match[2]}')
    elif _text(node) in ('true', 'false', 'True', 'False'):
        other = {'true': 'false', 'false': 'true', 'True': 'False',
                 'False': 'True'}[_text(node)]
        yield 'constant', node, node.start_byte, node.end_byte, other
    elif node.type == 'not_operator' or (
            node.type == 'unary_expression' and _text(node)[0] == '!'):
        yield ('negate', node, node.start_byte, node.end_byte,
               _text(node.named_children[-1]))


def _calls(node: tree_sitter.Node, function: tree_sitter.Node
           ) -> collections.abc.Iterator[_Change]:
    """Yield changes of a C call whose value is used: skip or ignore it."""
    place = node.start_byte, node.end_byte
    name = _callee(node)
    parent = node.parent
    if parent.parent.type != 'expression_statement':
        # Otherwise the statement is deleted, which is the same.
        yield ('unsync' if SYNC.search(name) else 'skip-call', node, *place,
               '0')
    target = ''
    if parent.type == 'assignment_expression':
        target = _text(parent.child_by_field_name('left'))
    elif parent.type == 'init_declarator':
        target = _text(parent.child_by_field_name('declarator'))
    elif parent.type == 'return_statement' and _text(
            function.child_by_field_name('type')) == 'gd_status':
        target = 's'
    if STATUS.match(target) and not TALK.match(name):
        yield 'ignore-status', node, *place, f'({_text(node)}, 0)'


def _statements(node: tree_sitter.Node, is_c: bool
                ) -> collections.abc.Iterator[_Change]:
    place = node.start_byte, node.end_byte
    nothing = ';' if is_c else 'pass'
    if node.type == 'expression_statement' and node.named_children:
        inner = node.named_children[0]
        if inner.type == 'await':
            inner = inner.named_children[0]
        left = inner.child_by_field_name('left')
        if inner.type in CALLS:
            yield ('unsync' if SYNC.search(_callee(inner)) else 'delete-call',
                   node, *place, nothing)
        elif is_c or (inner.type in ('assignment', 'augmented_assignment')
                      and left.type in ('attribute', 'subscript')):
            right = inner.child_by_field_name('right')
            synced = right and right.type in CALLS and SYNC.search(
                _callee(right))
            yield ('unsync' if synced else 'delete-assignment', node, *place,
                   nothing)
    elif node.type in ('raise_statement', 'break_statement'):
        yield 'delete-jump', node, *place, nothing
    elif node.type == 'continue_statement':
        yield 'delete-jump', node, *place, 'break;' if is_c else 'break'
    elif node.type == 'with_statement':
        clause = node.named_children[0]
        if clause.type == 'with_clause' and ' as ' not in _text(clause):
            yield ('unsync', clause, node.start_byte, clause.end_byte,
                   'if True')


def _orders(node: tree_sitter.Node) -> collections.abc.Iterator[_Change]:
    """Yield swaps of two neighbours whose effects others can see."""
    known = [child for child in node.named_children
             if child.type != 'comment']
    for one, two in zip(known, known[1:]):
        if all(s.type in ('expression_statement', 'if_statement')
               and 'return' not in _text(s) and ORDERED.search(_text(s))
               and not TALK.match(_text(s).partition('(')[0])
               for s in (one, two)):
            between = node.text[one.end_byte - node.start_byte:
                                two.start_byte - node.start_byte].decode()
            yield ('swap', one, one.start_byte, two.end_byte,
                   f'{_text(two)}{between}{_text(one)}')


def _early(node: tree_sitter.Node, is_c: bool
           ) -> collections.abc.Iterator[_Change]:
    known = [child for child in node.child_by_field_name('body').named_children
             if child.type != 'comment' and not (
                 child.named_children
                 and child.named_children[0].type == 'string')]
    if not known:
        return
    at = known[0].start_byte
    if is_c:
        pointer = node.child_by_field_name('declarator').type.startswith('p')
        void = _text(node.child_by_field_name('type')) == 'void'
        new = 'return; ' if void and not pointer else 'return 0; '
    else:
        new = f'return None\n{" " * known[0].start_point.column}'
    yield 'early-return', node, at, at, new


def _changes(node: tree_sitter.Node, is_c: bool,
             function: tree_sitter.Node | None
             ) -> collections.abc.Iterator[_Change]:
    if node.type in EXEMPT:
        return
    if node.type in CALLS and TALK.match(_callee(node)):
        # The arguments are left alone. The call itself is changed if its
        # result is the failure of its caller.
        if is_c and _callee(node).startswith('gd_fail') and function:
            yield from _calls(node, function)
        return
    if node.type == 'expression_statement' and TALK.match(
            _text(node).partition('(')[0]):
        return
    if node.type in FUNCTIONS:
        yield from _early(node, is_c)
        body = node.child_by_field_name('body')
        yield from _changes(body, is_c, node)
        return
    if function is not None:
        if node.type in CONDITIONAL:
            yield from _negations(node, is_c)
        if node.type in LISTS:
            yield from _orders(node)
        if is_c and node.type == 'call_expression' and (
                node.parent.type != 'expression_statement'):
            yield from _calls(node, function)
        yield from _tokens(node)
        yield from _statements(node, is_c)
        if node.type == 'raise_statement':
            return
    for child in node.children:
        yield from _changes(child, is_c, function)


def mutants(file: str, text: bytes) -> list[Mutant]:
    """Return all changes of a file, in its order."""
    is_c = file.endswith('.c')
    result: dict[str, Mutant] = {}
    root = _parser(file.rpartition('.')[2]).parse(text).root_node
    for name, node, start, end, new in _changes(root, is_c, None):
        before = text[:start]
        line = before.count(b'\n') + 1
        column = start - before.rfind(b'\n')
        place = f'{file}:{line}:{column}:{name}'
        key = next(key for key in (f'{place}.{i}' for i in itertools.count(1))
                   if key not in result)
        lines = ((node.start_point.row + 1, node.end_point.row + 1)
                 if node.type in FUNCTIONS else _lines(node))
        result[key] = Mutant(key, file, name, start, end, new, lines)
    return list(result.values())
