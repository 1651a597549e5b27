/** Numbers as texts, with units. */

const NONE = "–";

export function percent(share: number | null | undefined, digits = 1): string {
  return share == null || !Number.isFinite(share) ? NONE : `${(100 * share).toFixed(digits)}%`;
}

export function signed(share: number, digits = 1): string {
  const text = (100 * Math.abs(share)).toFixed(digits);
  return Number(text) === 0 ? text : `${share < 0 ? "−" : "+"}${text}`;
}

export function whole(value: number | null | undefined): string {
  return value == null ? NONE : Math.round(value).toLocaleString("en-US");
}

/** 1234567 as "1.23 M". */
export function count(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NONE;
  if (Math.abs(value) < 10_000) return value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 2 : 0 });
  if (Math.abs(value) >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  return Math.abs(value) >= 1e6 ? `${(value / 1e6).toFixed(2)} M` : `${(value / 1e3).toFixed(1)} k`;
}

/** At most `digits` significant digits, without an exponent where that is short. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value == null || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace("-", "−");
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 }).replace("-", "−");
}

export function dollars(value: number | null | undefined): string {
  if (value == null) return NONE;
  return `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 })}`;
}

/** Seconds as "850 ms", "12.3 s", "4 min 05 s", "3 h 12 min". */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return NONE;
  if (value < 1024) return `${value} B`;
  for (const [unit, size] of [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
  ] as const)
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${(value / 1024).toFixed(1)} KiB`;
}

/** A time stamp (ISO text, or seconds since 1970) as "2026-11-26 23:01:05 UTC". */
export function when(stamp: string | number | null | undefined): string {
  if (stamp == null || stamp === "") return NONE;
  const date = new Date(typeof stamp === "number" ? stamp * 1000 : stamp);
  return Number.isNaN(date.getTime()) ? String(stamp) : date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

export function ago(stamp: string | number | null | undefined, now = Date.now()): string {
  if (stamp == null || stamp === "") return NONE;
  const then = typeof stamp === "number" ? stamp * 1000 : Date.parse(stamp);
  if (Number.isNaN(then)) return String(stamp);
  const seconds = Math.max(0, (now - then) / 1000);
  if (seconds < 45) return "just now";
  if (seconds < 3600) return plural(Math.max(1, Math.round(seconds / 60)), "minute") + " ago";
  if (seconds < 86400) return plural(Math.round(seconds / 3600), "hour") + " ago";
  return plural(Math.round(seconds / 86400), "day") + " ago";
}

export function plural(n: number, one: string, many = one + "s"): string {
  return `${n.toLocaleString("en-US")} ${n === 1 ? one : many}`;
}
