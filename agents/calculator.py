"""The calculator of both tool agents: + - * / and brackets over numbers, read from a syntax tree and never evaluated as Python."""

import ast
import operator
from fractions import Fraction

LONGEST = 200  # characters of an expression
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an expression of numbers, + - * / and brackets.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculate(expression: str) -> str:
    """The value, exact where it is a whole number, else to 12 digits; a text that begins with `error:` for what cannot be read."""
    try:
        if len(expression) > LONGEST:
            raise ValueError(f"longer than {LONGEST} characters")
        result = value(ast.parse(expression.strip(), mode="eval").body)
        return str(result.numerator) if result.denominator == 1 else f"{float(result):.12g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as e:
        return f"error: {e}"


def value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError("only numbers, + - * / and brackets")
