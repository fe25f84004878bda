"""Documents to a filled cache: records and KV blocks from the store, prefill for what is missing.

Owns the order of the work and what makes two prompts the same; session.py owns turns.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import PurePath
from typing import BinaryIO

import torch
from torch import Tensor

from longread.cache import BLOCK_ROW_DIMS, KVCache
from longread.config import Settings
from longread.document import extract, options_key, read_source
from longread.entry import Entry
from longread.errors import ContextError
from longread.events import CacheUse, DocumentInfo, Notice, PasswordFn, Progress
from longread.live import Emit
from longread.manifest import BLOCK_LEN
from longread.model import Decoder
from longread.pinned import file_reader
from longread.policies import Policy
from longread.prompt import (
    ChatFormat,
    DocumentPrompt,
    TokenizedDocument,
    build_prompt,
    tokenize_document,
)
from longread.reread import DocumentRereader
from longread.store import Store
from longread.tensorfile import ReadFiles
from longread.tokenizer import Tokenizer
from longread.weights import ModelConfig

_BYTES_RESERVED = 1.15  # times the bytes of the rows: query statistics and an index come with them


def read_documents(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    store: Store | None,
    emit: Emit,
    *,
    pages: str | None,
    password: PasswordFn | None,
    stdin: BinaryIO | None,
) -> tuple[list[TokenizedDocument], list[str]]:
    """Each source's text and tokens, and the keys of their records in the store.

    A record spares extraction and tokenising. Raises DocumentError and its kinds, UsageError for a
    bad `pages`.
    """
    found, keys, shown = [], [], []
    for source in sources:
        raw = read_source(source, stdin=stdin)
        shown.append(PurePath(raw.source if source != "-" else raw.name))
        parts = (raw.sha256, options_key(raw, pages), tokenizer.identity)
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        record = store.load_record(key, notice=emit) if store else None
        if record is not None:
            tokenized = TokenizedDocument.from_record(record)
        else:
            document = extract(raw, pages=pages, password=password, progress=emit)
            tokenized = tokenize_document(tokenizer, document)
            if store:
                store.save_record(key, tokenized.to_record(), notice=emit)
        for warning in tokenized.document.warnings:
            emit(Notice(f"{raw.name}: {warning}"))
        found.append(tokenized)
        keys.append(key)
    names = _distinct_names(shown)
    return [item.renamed(name) for item, name in zip(found, names, strict=True)], keys


def _distinct_names(paths: Sequence[PurePath]) -> list[str]:
    """File names, with as many of their folders as tell equal ones apart."""
    names = [path.name for path in paths]
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        counts = Counter(names)
        names = [
            str(PurePath(*path.parts[-depth:])) if counts[name] > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def fit_prompt(
    tokenizer: Tokenizer,
    chat: ChatFormat,
    tokenized: Sequence[TokenizedDocument],
    config: ModelConfig,
    reserve: int,
    truncate: bool,
) -> tuple[DocumentPrompt, bool]:
    """The prompt of the documents, and whether they were cut to fit.

    reserve: tokens kept free for question and answer. With `truncate` the end of the documents is
    cut, the last document first. Raises ContextError with the numbers where they do not fit.
    """
    prompt, truncated = build_prompt(tokenizer, chat, tokenized), False
    excess = len(prompt.token_ids) + reserve - config.window
    if excess > 0 and truncate:
        cut = list(tokenized)
        for i in reversed(range(len(cut))):
            num_cut = min(excess, len(cut[i].token_ids))
            cut[i] = cut[i].first_tokens(len(cut[i].token_ids) - num_cut)
            excess -= num_cut
        prompt, truncated = build_prompt(tokenizer, chat, cut), True
    _check_fits(prompt, config, reserve)
    return prompt, truncated


def _check_fits(prompt: DocumentPrompt, config: ModelConfig, reserve: int) -> None:
    """Raise ContextError with the numbers where documents and reserve pass the window."""
    num_tokens = len(prompt.token_ids)
    sizes = [end - start for start, end in prompt.document_spans]
    if num_tokens + reserve <= config.window and any(sizes):
        return
    largest = sizes.index(max(sizes))
    tokenized = prompt.documents[largest]
    pages = tokenized.document.pages
    share = max(0, config.window - reserve - (num_tokens - sizes[largest])) / max(1, sizes[largest])
    last_page = pages[max(0, int(len(pages) * share * 0.95) - 1)].page_idx + 1
    advice = "let it be read by selection (--context auto, --policy tokenselect)"
    if reserve > config.window // 2:
        advice = "allow a shorter answer (--max-tokens)"
    elif share > 0 and len(pages) > 1:
        advice = f"read a part with --pages {pages[0].page_idx + 1}-{last_page}, or {advice}"
    raise ContextError(
        f"the documents are {num_tokens:,} tokens and the question and answer need {reserve:,}, "
        f"but the window of {config.name} is {config.window:,}; the largest document is "
        f"{tokenized.document.name}, {sizes[largest]:,} tokens on {len(pages):,} "
        f"{'page' if len(pages) == 1 else 'pages'}: {advice}"
    )


def document_info(tokenized: TokenizedDocument) -> DocumentInfo:
    """What a user is told of a document."""
    document = tokenized.document
    numbers = (page.page_idx + 1 for page in document.pages)
    return DocumentInfo(
        document.name,
        len(document.pages),
        len(tokenized.token_ids),
        tuple(zip(numbers, tokenized.page_token_starts.tolist(), strict=True)),
    )


def base_key(decoder: Decoder, tokenizer: Tokenizer, chat: ChatFormat, settings: Settings) -> str:
    """What besides the token ids decides the KV."""
    config = json.loads(decoder.config.to_json())
    del config["name"]  # the same weights may have been converted under another
    return Store.base_key(
        {
            "weights": decoder.config.identity,
            "config": config,
            "tokenizer": tokenizer.identity,
            "chat": chat.identity,
            "dtype": str(decoder.dtype),
            "kv_dtype": settings.kv_dtype,
            "layout": decoder.kv_layout,
        }
    )


def fill_cache(
    prompt: DocumentPrompt,
    decoder: Decoder,
    cache: KVCache,
    policy: Policy,
    settings: Settings,
    store: Store | None,
    base: str,
    record_keys: Sequence[str],
    emit: Emit,
) -> CacheUse:
    """Bring every document row into `cache` and prepare the policy; returns what was reused.

    Each block of rows is durable in the store as soon as it is read, so that an interruption costs
    one block. Raises StoreError where the store cannot be written or another process holds it.
    """
    token_ids = prompt.token_ids
    rereader = DocumentRereader(decoder, torch.from_numpy(token_ids).long())
    if store is None:
        while cache.length < len(token_ids):
            _prefill_block(prompt, decoder, cache, settings, emit)
        policy.prepare(cache, rereader)
        return CacheUse(False, 0, len(token_ids), 0, "")
    with store.entry(
        base,
        token_ids,
        row_dims=BLOCK_ROW_DIMS,
        wait=not settings.no_wait,
        notice=emit,
        names=[tokenized.document.name for tokenized in prompt.documents],
        model=decoder.config.name,
        records=record_keys,
    ) as entry:
        num_reused = restore(entry, cache, emit)
        if cache.length < len(token_ids):
            # Another entry's prefix may end inside what is read as one. The moments then count a
            # few queries twice, which a statistic can bear.
            cut = cache.length % (decoder.chunk_tokens or 1)
            cache.truncate(cache.length - cut)
            num_reused -= cut
            row_bytes = cache.num_bytes / cache.capacity
            if settings.kv_dtype == "int8":
                row_bytes /= cache.k.element_size()
            entry.reserve(int(row_bytes * (len(token_ids) - cache.length) * _BYTES_RESERVED))
        while cache.length < len(token_ids):
            start, block = _prefill_block(prompt, decoder, cache, settings, emit)
            entry.write_block(start, cache.length, block)
            num_reused += restore(entry, cache, emit)  # blocks that lie behind a damaged one
        if not entry.complete:
            entry.finish()
        cache.by_products = entry
        policy.prepare(cache, rereader)
        cache.by_products = None
        hit = num_reused == len(token_ids)
        return CacheUse(hit, num_reused, len(token_ids) - num_reused, entry.num_bytes, entry.key)


def restore(entry: Entry, cache: KVCache, emit: Emit, read: ReadFiles | None = None) -> int:
    """Load the stored rows that follow the cache's; returns how many.

    read: how to read the entry's files; pinned.py's choice for the cache's device where None.
    """
    start = cache.length
    if start % BLOCK_LEN:
        return 0
    with closing(entry.read_blocks(start, read or file_reader(cache.k.device))) as blocks:
        for block in blocks:
            cache.load_block(block.start, block.end, block.tensors)
            emit(Progress("restore", block.end, entry.num_tokens, "tokens"))
    return cache.length - start


def _prefill_block(
    prompt: DocumentPrompt, decoder: Decoder, cache: KVCache, settings: Settings, emit: Emit
) -> tuple[int, dict[str, Tensor]]:
    """Read up to the next multiple of the block length; returns the whole block and its start."""
    total = len(prompt.token_ids)
    start = cache.length - cache.length % BLOCK_LEN  # before a prefix that ends inside a block
    end = min(start + BLOCK_LEN, total)
    if cache.length == start:
        cache.block_moment.zero_()
    emit(Progress("prefill", cache.length, total, "tokens"))

    def on_layer(num_read: int) -> None:
        emit(Progress("prefill", num_read, total, "tokens"))

    token_ids = torch.from_numpy(prompt.token_ids[cache.length : end]).long()
    decoder.prefill(token_ids, cache, on_layer)
    return start, cache.export_block(start, end, settings.kv_dtype)
