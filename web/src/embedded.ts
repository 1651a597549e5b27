/** Answers out of the object that a report embeds. Lists are whole there: they are filtered, sorted and cut here. */
import type { EpisodeLine, Embedded, Page } from "./api";

/** The answer at an address; undefined where the report does not have it. */
export function answerFrom({ answers }: Embedded, address: string): unknown {
  const [path = "", text = ""] = address.split("?");
  const exact = answers[address];
  if (exact !== undefined) return exact;
  const whole = answers[path];
  if (!isPage(whole)) return whole;
  const query = new URLSearchParams(text);
  let items = whole.items;
  for (const [name, value] of query) if (value) items = items.filter((item) => matches(item, name, value));
  const sort = query.get("sort");
  if (sort) items = sorted(items, sort);
  const offset = Number(query.get("offset") ?? 0);
  const limit = Number(query.get("limit") ?? items.length);
  return { ...whole, total: items.length, offset, items: items.slice(offset, offset + limit) };
}

type Row = Record<string, unknown>;

function isPage(value: unknown): value is Page<Row> {
  return typeof value === "object" && value !== null && Array.isArray((value as { items?: unknown }).items);
}

const EXACT = new Set(["outcome", "category", "channel", "fate", "state", "group"]);

function matches(row: Row, name: string, value: string): boolean {
  if (EXACT.has(name)) return !(name in row) || String(row[name]) === value;
  if (name === "check") return ((row as Partial<EpisodeLine>).failed ?? []).includes(value);
  if (name === "flaw") return value in ((row.flaws as Row | undefined) ?? {});
  if (name === "q") {
    const low = value.toLowerCase();
    return [row.task, row.cause, row.text, row.failed].some((part) =>
      String(part ?? "").toLowerCase().includes(low),
    );
  }
  return true;
}

/** The keys of a list's sort that are not names of its rows' fields. */
const VALUES: Record<string, (row: Row) => unknown> = {
  tokens: (row) => Number(row.prompt_tokens ?? 0) + Number(row.completion_tokens ?? 0),
  cost: (row) => row.cost_usd,
};

export function sorted(rows: Row[], sort: string): Row[] {
  const down = sort.startsWith("-");
  const name = down ? sort.slice(1) : sort;
  const value = VALUES[name] ?? ((row: Row) => row[name]);
  const sign = down ? -1 : 1;
  return rows
    .map((row) => [value(row), row] as const)
    .sort(([x], [y]) => {
      if (x == null || y == null) return x == null && y == null ? 0 : x == null ? 1 : -1;
      if (typeof x === "number" && typeof y === "number") return sign * (x - y);
      const [a, b] = [String(x), String(y)];
      return sign * (a < b ? -1 : a > b ? 1 : 0);
    })
    .map(([, row]) => row);
}
