"""Rewrites Python source so that each assignment in a function hands on what it assigned.

`x = f(y)` becomes `x = f(y); HOOK("forward", "x", x)` in the same line: no statement moves, so tracebacks,
line events, coverage and breakpoints are those of the source. A value inside an expression (`:=`) passes
through the hook, the names of a comprehension are handed on by a condition that always holds. Imports no
torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import TypeVar

_Node = TypeVar("_Node", bound="ast.expr | ast.stmt")

# A builtin, so that no module gets a name that its author did not write.
HOOK = "__dispatch_trace_line__"


def compile_with_hooks(source: str | bytes, filename: str) -> CodeType:
    """The code of a module whose functions hand on what they assign.

    Raises:
      SyntaxError, ValueError: the source is no Python.
    """
    tree = _Rewriter().visit(ast.parse(source, filename))
    code: CodeType = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
    return code


class _Rewriter(ast.NodeTransformer):
    """Adds the hooks, within functions only: modules and class bodies assign once, at import."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._in_function = False

    # -- scopes --------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scope(node, in_function=True)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._scope(node, in_function=True)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scope(node, in_function=False)

    def _scope(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, *, in_function: bool
    ) -> ast.AST:
        before = self._in_function
        self._names.append(node.name)
        self._in_function = in_function
        node.body = [new for statement in node.body for new in self._statements(statement)]
        self._in_function = before
        self._names.pop()
        return node

    def _statements(self, statement: ast.stmt) -> list[ast.stmt]:
        found = self.visit(statement)
        return found if isinstance(found, list) else [found]

    # -- statements ----------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node, *(call for target in node.targets for call in self._calls(target))]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node, *(self._calls(node.target) if node.value is not None else ())]

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node, *self._calls(node.target)]

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.body = [*self._calls(node.target), *node.body]
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        self.generic_visit(node)
        node.body = [*self._calls(node.target), *node.body]
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        return self._with(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self._with(node)

    def _with(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
        node.body = [*(call for target in targets for call in self._calls(target)), *node.body]
        return node

    # -- expressions ---------------------------------------------------------------------------------

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self.generic_visit(node)
        if self._in_function:
            node.value = self._hook(node.value, [(node.target.id, node.value)])
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        named = list(_named(node.target))
        if self._in_function and named:
            condition = ast.Tuple([self._hook(node.target, named)], ast.Load())  # not empty, so true
            node.ifs.insert(0, _at(condition, node.target))
        return node

    # -- calls of the hook ---------------------------------------------------------------------------

    def _calls(self, target: ast.expr) -> list[ast.stmt]:
        named = list(_named(target)) if self._in_function else []
        return [_at(ast.Expr(self._hook(target, named)), target)] if named else []

    def _hook(self, where: ast.expr, named: list[tuple[str, ast.expr]]) -> ast.Call:
        """HOOK(function, name, value, ...), which returns the last value."""
        arguments: list[ast.expr] = [ast.Constant(".".join(self._names))]
        for name, value in named:
            arguments += [ast.Constant(name), value]
        return _at(ast.Call(ast.Name(HOOK, ast.Load()), arguments, []), where)


def _named(target: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names that a target assigns, with an expression for what they hold now.

    `self.h` and what `x[i]` writes into are looked up by the hook, without running a property: for these the
    expression is the pair of the object and the attribute's name.
    """
    if isinstance(target, ast.Name):
        yield target.id, _at(ast.Name(target.id, ast.Load()), target)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _named(element)
    elif isinstance(target, (ast.Starred, ast.Subscript)):
        yield from _named(target.value)
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        base = _at(ast.Name(target.value.id, ast.Load()), target)
        pair = ast.Tuple([base, ast.Constant(target.attr)], ast.Load())
        yield f"{target.value.id}.{target.attr}", _at(pair, target)


def _at(node: _Node, where: ast.AST) -> _Node:
    """The node, with all that is in it, at the place of another."""
    for part in ast.walk(node):
        if isinstance(part, (ast.expr, ast.stmt)) and not hasattr(part, "lineno"):
            ast.copy_location(part, where)
    return node
