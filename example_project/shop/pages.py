"""The shop's HTML."""

from collections.abc import Iterable

from django.contrib import messages
from django.http import HttpRequest
from django.middleware.csrf import get_token
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from .models import Item

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
  body {{ font: 1.1rem/1.5 system-ui, sans-serif; max-width: 34rem; margin: 3rem auto; padding: 0 1rem; color: #234 }}
  table {{ width: 100%; border-collapse: collapse }}
  th, td {{ padding: .4rem; text-align: left; border-bottom: 1px solid #dde4ea }}
  .number {{ text-align: right; font-variant-numeric: tabular-nums }}
  button {{ font: inherit; padding: .1rem 1rem; border: 0; border-radius: .3rem; background: #2a7; color: white }}
  button:disabled {{ background: #bcc8d0 }}
  .message {{ padding: .4rem 1rem; background: #e3f6ec; border-radius: .3rem }}
</style>
<h1>{title}</h1>
{body}
"""

FRONT = """{messages}
<form method="post">
<input type="hidden" name="csrfmiddlewaretoken" value="{token}">
<table>
<tr><th>Item<th class="number">Price<th class="number">In stock<th>
{rows}
</table>
</form>
<p><a href="{admin}">Admin</a></p>
"""

ROW = '<tr><td>{}<td class="number">{}<td class="number">{}<td class="number"><button formaction="{}"{}>Buy</button>\n'


def front(request: HttpRequest, items: Iterable[Item]) -> SafeString:
    told = format_html_join("\n", '<p class="message">{}</p>', ((text,) for text in messages.get_messages(request)))
    rows = format_html_join("", ROW, map(_row, items))
    body = format_html(FRONT, messages=told, token=get_token(request), rows=rows, admin=reverse("admin:index"))
    return format_html(PAGE, title="A small shop", body=body)


def _row(item: Item) -> tuple[object, ...]:
    return item.name, item.price, item.stock, reverse("buy", args=[item.pk]), "" if item.stock else " disabled"


def sold_out(item: Item) -> SafeString:
    back = format_html('<p>Somebody was faster. <a href="{}">Back to the shop</a></p>', reverse("front_page"))
    return format_html(PAGE, title=f"{item.name} is sold out", body=back)
