"""The pages that are written here: the gallery of what was saved, and a label's own page with its QR code.

Whatever comes from a label or an option is text: all of it goes through ``html.escape``.
"""

import io
from collections.abc import Sequence
from html import escape

import segno

from mmserve.demos.placard.store import Saved

ROOT = "/placard"
FONT = "instrument-sans-latin.woff2"
QUIET_ZONE = 4  # modules around a QR code, which readers need

WORDS = {
    "en": {
        "brand": "Art placard",
        "gallery": "Saved labels",
        "camera": "Back to the camera",
        "empty": "Nothing has been saved yet.",
        "missing": "There is no such label here. It may have been deleted.",
        "open": "Open",
        "delete": "Delete",
        "sure": "Delete for good?",
        "older": "Older",
        "newest": "Newest",
        "machine": "Written by a machine, {model}, on {day}. It can be wrong.",
        "scan": "Scan to open this label",
    },
    "de": {
        "brand": "Museumsschild",
        "gallery": "Gespeicherte Schilder",
        "camera": "Zurück zur Kamera",
        "empty": "Noch ist nichts gespeichert.",
        "missing": "Dieses Schild gibt es hier nicht. Vielleicht wurde es gelöscht.",
        "open": "Öffnen",
        "delete": "Löschen",
        "sure": "Endgültig löschen?",
        "older": "Ältere",
        "newest": "Neueste",
        "machine": "Von einer Maschine geschrieben, {model}, am {day}. Sie kann sich irren.",
        "scan": "Scannen, um dieses Schild zu öffnen",
    },
    "fr": {
        "brand": "Cartel d’exposition",
        "gallery": "Cartels enregistrés",
        "camera": "Retour à la caméra",
        "empty": "Rien n’est encore enregistré.",
        "missing": "Ce cartel n’est pas ici. Il a peut-être été supprimé.",
        "open": "Ouvrir",
        "delete": "Supprimer",
        "sure": "Supprimer définitivement ?",
        "older": "Plus anciens",
        "newest": "Plus récents",
        "machine": "Écrit par une machine, {model}, le {day}. Elle peut se tromper.",
        "scan": "Scannez pour ouvrir ce cartel",
    },
    "es": {
        "brand": "Cartela de museo",
        "gallery": "Cartelas guardadas",
        "camera": "Volver a la cámara",
        "empty": "Todavía no se ha guardado nada.",
        "missing": "Esta cartela no está aquí. Quizá se eliminó.",
        "open": "Abrir",
        "delete": "Eliminar",
        "sure": "¿Eliminar definitivamente?",
        "older": "Anteriores",
        "newest": "Más recientes",
        "machine": "Escrita por una máquina, {model}, el {day}. Puede equivocarse.",
        "scan": "Escanee para abrir esta cartela",
    },
    "it": {
        "brand": "Didascalia da museo",
        "gallery": "Didascalie salvate",
        "camera": "Torna alla fotocamera",
        "empty": "Non è stato ancora salvato nulla.",
        "missing": "Questa didascalia non è qui. Forse è stata eliminata.",
        "open": "Apri",
        "delete": "Elimina",
        "sure": "Eliminare per sempre?",
        "older": "Precedenti",
        "newest": "Più recenti",
        "machine": "Scritta da una macchina, {model}, il {day}. Può sbagliare.",
        "scan": "Inquadra per aprire questa didascalia",
    },
    "ja": {
        "brand": "美術館のキャプション",
        "gallery": "保存したキャプション",
        "camera": "カメラに戻る",
        "empty": "まだ何も保存されていません。",
        "missing": "このキャプションはありません。削除された可能性があります。",
        "open": "開く",
        "delete": "削除",
        "sure": "完全に削除しますか？",
        "older": "以前のもの",
        "newest": "最新",
        "machine": "機械（{model}）が{day}に書きました。誤りがあるかもしれません。",
        "scan": "読み取るとこのキャプションが開きます",
    },
    "tr": {
        "brand": "Müze etiketi",
        "gallery": "Kaydedilen etiketler",
        "camera": "Kameraya dön",
        "empty": "Henüz hiçbir şey kaydedilmedi.",
        "missing": "Burada böyle bir etiket yok. Silinmiş olabilir.",
        "open": "Aç",
        "delete": "Sil",
        "sure": "Kalıcı olarak silinsin mi?",
        "older": "Daha eski",
        "newest": "En yeni",
        "machine": "Bir makine yazdı: {model}, {day}. Yanılabilir.",
        "scan": "Bu etiketi açmak için tarayın",
    },
}


def language_of(accepted: str, default: str) -> str:
    """The first of the languages of an accept-language header that is known here."""
    wanted = (part.partition(";")[0].strip().lower().split("-")[0] for part in accepted.split(","))
    return next((name for name in wanted if name in WORDS), default)


def gallery(labels: Sequence[Saved], following: int | None, first: bool, language: str) -> str:
    """A page of saved labels. ``following`` is where the next one begins; the ``first`` has none before."""
    words = WORDS[language]
    works = "\n".join(_work(saved, language) for saved in labels)
    inner = f'<ul class="wall">\n{works}\n</ul>' if labels else f'<p class="empty">{words["empty"]}</p>'
    links = [] if first else [f'<a rel="first" href="{ROOT}/gallery">{words["newest"]}</a>']
    if following is not None:
        links.append(f'<a rel="next" href="{ROOT}/gallery?before={following}">{words["older"]}</a>')
    pages = f'\n<nav class="pages">{" ".join(links)}</nav>' if links else ""
    main = f"{_bar(words['gallery'], {'/': words['camera']})}\n<main>\n{inner}{pages}\n</main>"
    return _page("gallery", words["gallery"], language, main, ("placard", "gallery"))


def permalink(saved: Saved, address: str, language: str) -> str:
    """A label's own page, whose QR code leads to ``address``."""
    words = WORDS[language]
    bar = _bar(words["brand"], {"/": words["camera"], "/gallery": words["gallery"]})
    main = f"""{bar}
<main>
<figure class="picture">{_image(saved)}</figure>
{_label(saved, language)}
<aside class="qr">{_code(address, words["scan"])}<p>{words["scan"]}</p></aside>
<div class="actions">{_delete(saved, words)}</div>
</main>"""
    return _page("permalink", saved.label.title, language, main, ("placard", "gallery", "print"))


def missing(language: str) -> str:
    """In the place of a label's page where there is none."""
    words = WORDS[language]
    bar = _bar(words["brand"], {"/": words["camera"], "/gallery": words["gallery"]})
    main = f'{bar}\n<main>\n<p class="empty">{words["missing"]}</p>\n</main>'
    return _page("permalink", words["gallery"], language, main, ("placard", "gallery"))


def code(address: str) -> bytes:
    """A QR code as an SVG file of its own."""
    out = io.BytesIO()
    segno.make_qr(address, error="m").save(
        out, kind="svg", omitsize=True, border=QUIET_ZONE, dark="#000", light="#fff", title=address
    )
    return out.getvalue()


def _work(saved: Saved, language: str) -> str:
    words, address = WORDS[language], f"{ROOT}/labels/{saved.id}"
    return f"""<li class="work" id="{saved.id}">
<a class="picture" href="{address}">{_image(saved, lazy=True)}</a>
{_label(saved, language)}
<div class="actions"><a href="{address}">{words["open"]}</a> {_delete(saved, words)}</div>
</li>"""


def _label(saved: Saved, language: str) -> str:
    label = saved.label
    title, date = escape(label.title), escape(label.date)
    day = saved.saved_at[:10]
    told = WORDS[language]["machine"].format(
        model=escape(saved.model), day=f'<time datetime="{day}">{day}</time>'
    )
    return f"""<article class="{_kind(label.text)}" lang="{escape(saved.language)}">
<p class="maker">{escape(label.maker)}</p>
<h2 class="work-line"><cite class="title">{title}</cite>, <span class="date">{date}</span></h2>
<p class="medium">{escape(label.medium)}</p>
<p class="dimensions">{escape(label.dimensions)}</p>
<p class="credit">{escape(label.credit_line)}</p>
<p class="text">{escape(label.text)}</p>
<p class="machine" lang="{language}">{told}</p>
</article>"""


def _kind(text: str) -> str:
    """The class of a label by how long its ``text`` is, for print.css: its card has one size."""
    width = sum(2 if char > "\u2e80" else 1 for char in text)  # of Japanese, each fills a square
    return "label longer" if width > 320 else "label long" if width > 200 else "label"


def _image(saved: Saved, lazy: bool = False) -> str:
    loading = ' loading="lazy"' if lazy else ""
    alt = escape(saved.label.alt_text or saved.label.title)
    size = f'width="{saved.width}" height="{saved.height}"'
    return f'<img src="{ROOT}/labels/{saved.id}.jpg" alt="{alt}" {size}{loading}>'


def _delete(saved: Saved, words: dict[str, str]) -> str:
    """A form, so that it works without a script; one that is there asks first."""
    asks = f'data-delete="{saved.id}" data-ask="{words["sure"]}"'
    button = f'<button type="submit" {asks}>{words["delete"]}</button>'
    return f'<form method="post" action="{ROOT}/labels/{saved.id}/delete">{button}</form>'


def _code(address: str, title: str) -> str:
    inner = segno.make_qr(address, error="m").svg_inline(
        omitsize=True, border=QUIET_ZONE, dark="#000", light="#fff", svgclass=None, lineclass=None
    )
    return inner.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _bar(title: str, links: dict[str, str]) -> str:
    nav = " ".join(f'<a href="{ROOT}{path}">{name}</a>' for path, name in links.items())
    return f'<header class="bar"><h1>{title}</h1><nav>{nav}</nav></header>'


def _page(kind: str, title: str, language: str, inner: str, styles: Sequence[str]) -> str:
    media = {"print": ' media="print"'}
    sheets = "\n".join(
        f'<link rel="stylesheet" href="{ROOT}/static/{name}.css"{media.get(name, "")}>' for name in styles
    )
    return f"""<!doctype html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>{escape(title)}</title>
<link rel="icon" href="{ROOT}/static/icon.svg">
<link rel="preload" href="{ROOT}/static/fonts/{FONT}" as="font" type="font/woff2" crossorigin>
{sheets}
<script type="module" src="{ROOT}/static/gallery.js"></script>
</head>
<body class="{kind}">
{inner}
</body>
</html>
"""
