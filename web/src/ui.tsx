/** Parts that all pages are made of. */
import { Button, TextInput } from "@mantine/core";
import { useEffect, useId, useState, type ReactNode, type Ref } from "react";
import { Link } from "wouter";
import type { Estimate, State } from "./api";
import type { Asked, Failed } from "./data";
import { percent, plural, whole } from "./format";
import { Icon, type IconName } from "./icons";
import { visible } from "./visible";

// ------------------------------------------------------------------------------------------------- frame of a page

export function Head(props: {
  title: string;
  crumbs?: [string, string][];
  marks?: ReactNode;
  actions?: ReactNode;
  facts?: [string, string][];
}) {
  useTitle(props.title);
  return (
    <>
      {props.crumbs && props.crumbs.length > 0 && (
        <nav aria-label="Breadcrumb">
          <ol className="crumbs">
            {props.crumbs.map(([name, to]) => (
              <li key={to}>
                <Link href={to}>{name}</Link>
              </li>
            ))}
          </ol>
        </nav>
      )}
      <div className="head">
        <h1 tabIndex={-1}>
          {props.title || "–"}
          {props.marks && <span className="marks">{props.marks}</span>}
        </h1>
        {props.actions && <div className="actions">{props.actions}</div>}
      </div>
      {props.facts && <Facts rows={props.facts} />}
    </>
  );
}

export function useTitle(title: string) {
  useEffect(() => {
    document.title = title ? `${visible(title).slice(0, 120)} · ClawGym` : "ClawGym";
  }, [title]);
}

export function Facts({ rows }: { rows: [string, string][] }) {
  if (!rows.length) return null;
  return (
    <dl className="facts">
      {rows.map(([name, value], at) => (
        <div key={at}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Section(props: { title: string; aside?: ReactNode; children: ReactNode; id?: string }) {
  const id = useId();
  return (
    <section aria-labelledby={id}>
      <div className="title">
        <h2 id={id}>{props.title}</h2>
        {props.aside && <div className="soft">{props.aside}</div>}
      </div>
      {props.children}
    </section>
  );
}

export function Tile(props: { label: string; value: ReactNode; note?: ReactNode; main?: boolean; children?: ReactNode }) {
  return (
    <div className={props.main ? "card tile main" : "card tile"}>
      <div className="label">{props.label}</div>
      <div className="value">{props.value}</div>
      {props.children}
      {props.note && <div className="note">{props.note}</div>}
    </div>
  );
}

// ------------------------------------------------------------------------------------------------- states of an answer

/** What an answer shows, or that it is loading, or what went wrong. An older answer stays when a newer one fails. */
export function Shown<T>({ asked, children }: { asked: Asked<T>; children: (data: T) => ReactNode }) {
  if (asked.data === undefined) return asked.error ? <Problem error={asked.error} again={asked.again} /> : <Loading />;
  return (
    <>
      {asked.error && (
        <Notice kind="warn">
          <b>This is not the newest state.</b> {asked.error.message}{" "}
          <button className="more" onClick={asked.again}>
            Try again
          </button>
        </Notice>
      )}
      {children(asked.data)}
    </>
  );
}

export function Loading() {
  // What is there at once needs no placeholder that flashes.
  const [late, set] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => set(true), 200);
    return () => clearTimeout(timer);
  }, []);
  return (
    <div role="status" aria-label="Loading" style={{ visibility: late ? "visible" : "hidden" }}>
      <div className="ghost" style={{ width: "30%", height: 22, marginBottom: 24 }} />
      <div className="tiles">
        {[0, 1, 2, 3].map((n) => (
          <div key={n} className="card" style={{ height: 96 }}>
            <div className="ghost" style={{ width: "50%", marginBottom: 14 }} />
            <div className="ghost" style={{ width: "70%", height: 20 }} />
          </div>
        ))}
      </div>
      <div className="card" style={{ height: 280, marginTop: 28 }} />
    </div>
  );
}

export function Problem({ error, again }: { error: Failed; again?: () => void }) {
  const title = error.status === 404 ? "Nothing is here" : error.status === 0 ? "No connection" : "This cannot be shown";
  return (
    <Blank icon={error.status === 404 ? "empty" : "warn"} title={title} alert>
      <p>{error.message}</p>
      <div className="actions">
        {again && (
          <Button variant="default" size="xs" onClick={again} leftSection={<Icon name="retry" />}>
            Try again
          </Button>
        )}
        <Link href="/">All sources</Link>
      </div>
    </Blank>
  );
}

/** A state that takes the place of a list: what is missing, and what to do. */
export function Blank(props: {
  icon?: IconName;
  title: string;
  children?: ReactNode;
  small?: boolean;
  alert?: boolean;
}) {
  return (
    <div className={props.small ? "state small" : "state"} role={props.alert ? "alert" : undefined}>
      <Icon name={props.icon ?? "empty"} size={props.small ? 24 : 36} />
      <h2>{props.title}</h2>
      {props.children}
    </div>
  );
}

export function Notice(props: { kind?: "info" | "warn" | "error"; children: ReactNode }) {
  const kind = props.kind ?? "info";
  return (
    <div className={`notice ${kind}`} role="note">
      <Icon name={kind === "info" ? "info" : "warn"} size={16} />
      <div>{props.children}</div>
    </div>
  );
}

export function Notes({ notes }: { notes: string[] }) {
  return notes.map((note, at) => <Notice key={at}>{note}</Notice>);
}

/** Names with reasons that open on a click. */
export function Reasons({ title, rows }: { title: string; rows: Record<string, string> | string[] }) {
  const list: [string, string][] = Array.isArray(rows) ? rows.map((row) => [row, ""]) : Object.entries(rows);
  if (!list.length) return null;
  return (
    <div className="notice" role="note">
      <Icon name="info" size={16} />
      <div>
        <details>
          <summary>{title}</summary>
          <ul>
            {list.slice(0, 500).map(([name, why], at) => (
              <li key={at}>
                <code>{name}</code> {why && <span className="soft">{why}</span>}
              </li>
            ))}
            {list.length > 500 && <li className="soft">and {whole(list.length - 500)} more</li>}
          </ul>
        </details>
      </div>
    </div>
  );
}

// ------------------------------------------------------------------------------------------------- marks

const OUTCOMES: Record<string, [string, IconName]> = {
  solved: ["solved", "check"],
  failed: ["failed", "cross"],
  truncated: ["truncated", "clock"],
  infra: ["infrastructure error", "bolt"],
  unsupported: ["unsupported", "none"],
};

export const outcomeName = (outcome: string) => OUTCOMES[outcome]?.[0] ?? outcome;

export function OutcomeMark({ outcome }: { outcome: string }) {
  const known = OUTCOMES[outcome];
  return (
    <span className={`mark ${known ? outcome : "plain"}`}>
      {known && <Icon name={known[1]} size={12} />}
      {outcome === "infra" ? "infra" : outcomeName(outcome)}
    </span>
  );
}

const STATES: Record<State, [string, IconName | null, string]> = {
  running: ["running", null, "Another process writes it now."],
  complete: ["complete", "check", "Everything that was planned is there."],
  incomplete: ["incomplete", "clock", "It was interrupted, or has not been started."],
  damaged: ["damaged", "warn", "It cannot be read."],
  unknown: ["unknown", null, "Nothing says whether it is complete."],
};

export function StateMark({ state }: { state: State }) {
  const [name, icon, about] = STATES[state] ?? STATES.unknown;
  if (state === "unknown") return null;
  return (
    <span className={`mark ${state}`} title={about}>
      {icon ? <Icon name={icon} size={12} /> : <span className="pulse" aria-hidden="true" />}
      {name}
    </span>
  );
}

export function Mark({ kind, icon, children }: { kind?: string; icon?: IconName; children: ReactNode }) {
  return (
    <span className={`mark ${icon ? "" : "plain"} ${kind ?? ""}`}>
      {icon && <Icon name={icon} size={12} />}
      {children}
    </span>
  );
}

// ------------------------------------------------------------------------------------------------- small charts

/** A mean and its 95 % interval on an axis from `from` to `to`. */
export function Whisker(props: { value: number; low: number; high: number; from?: number; to?: number; label: string }) {
  const { value, low, high, from = 0, to = 1 } = props;
  const x = (at: number) => (100 * (Math.min(to, Math.max(from, at)) - from)) / (to - from);
  return (
    <div className="whisker" role="img" aria-label={props.label}>
      <span className="axis" />
      {from < 0 && <span className="zero" style={{ left: `${x(0)}%` }} />}
      <span className="range" style={{ left: `${x(low)}%`, width: `${x(high) - x(low)}%` }} />
      <span className="dot" style={{ left: `${x(value)}%` }} />
    </div>
  );
}

export function EstimateBar({ estimate }: { estimate: Estimate }) {
  const text = `${percent(estimate.value)}, 95% interval ${percent(estimate.low)} to ${percent(estimate.high)}`;
  return <Whisker value={estimate.value} low={estimate.low} high={estimate.high} label={text} />;
}

export function interval(estimate: { low: number; high: number } | null | undefined): string {
  return estimate ? `${(100 * estimate.low).toFixed(1)} – ${(100 * estimate.high).toFixed(1)}` : "";
}

export interface BarRow {
  name: ReactNode;
  share: number;
  text: string;
  key: string;
}

export function Bars({ rows, most = 12, colour = "var(--c0)" }: { rows: BarRow[]; most?: number; colour?: string }) {
  const [all, set] = useState(false);
  const shown = all ? rows : rows.slice(0, most);
  return (
    <>
      <ul className="bars">
        {shown.map((row) => (
          <li key={row.key}>
            <div style={{ minWidth: 0 }}>{row.name}</div>
            <div className="track" aria-hidden="true">
              <div style={{ width: `${100 * Math.min(1, Math.max(0, row.share))}%`, background: colour }} />
            </div>
            <div className="num">{row.text}</div>
          </li>
        ))}
      </ul>
      {rows.length > most && (
        <button className="more" aria-expanded={all} onClick={() => set(!all)}>
          {all ? "Show fewer" : `Show all ${whole(rows.length)}`}
        </button>
      )}
    </>
  );
}

const COLOURS: Record<string, number> = { solved: 0, failed: 1, truncated: 4, infra: 3, unsupported: 6, open: 5, delivered: 0, consumed: 0, dropped: 1 };

/** Counts as one bar of colours, with a legend that carries the numbers. */
export function Counts({ rows }: { rows: [string, number][] }) {
  const total = rows.reduce((sum, [, n]) => sum + n, 0);
  const left = [0, 1, 2, 3, 4, 5, 6].filter((n) => !rows.some(([name]) => COLOURS[name] === n));
  const colours = rows.map(([name]) => `var(--c${COLOURS[name] ?? left.shift() ?? 6})`);
  const colour = (at: number) => colours[at];
  return (
    <>
      <div className="stack" aria-hidden="true">
        {rows.map(([name, n], at) => (
          <div key={name} style={{ width: `${(100 * n) / Math.max(1, total)}%`, background: colour(at) }} />
        ))}
      </div>
      <ul className="legend">
        {rows.map(([name, n], at) => (
          <li key={name}>
            <span className="swatch" style={{ background: colour(at) }} />
            {name} <b>{whole(n)}</b> <span className="soft">{percent(n / Math.max(1, total), 0)}</span>
          </li>
        ))}
      </ul>
    </>
  );
}

/** Two stacked counts in bins of equal width from 0 to 1. */
export function Histogram({ low, high, names }: { low: number[]; high: number[]; names: [string, string] }) {
  const n = Math.max(low.length, high.length);
  const most = Math.max(1, ...Array.from({ length: n }, (_, at) => (low[at] ?? 0) + (high[at] ?? 0)));
  const [width, height] = [560, 150];
  const step = width / Math.max(1, n);
  const tall = (value: number) => (height * value) / most;
  const sum = (values: number[]) => values.reduce((a, b) => a + b, 0);
  const id = useId();
  const label = `Histogram of official scores: ${sum(high)} ${names[1]}, ${sum(low)} ${names[0]}; at most ${most} in one of ${n} bins.`;
  return (
    <figure>
      <svg viewBox={`-34 -10 ${width + 54} ${height + 32}`} width="100%" role="img" aria-label={label}>
        <defs>
          <pattern id={id} width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
            <rect width="5" height="5" fill="var(--c1)" opacity="0.45" />
            <rect width="2.4" height="5" fill="var(--c1)" />
          </pattern>
        </defs>
        <line x1={0} x2={width} y1={height} y2={height} stroke="var(--strong-line)" />
        <text x={-6} y={height + 3} textAnchor="end">
          0
        </text>
        <text x={-6} y={4} textAnchor="end">
          {String(most)}
        </text>
        {Array.from({ length: n }, (_, at) => {
          const [a, b] = [low[at] ?? 0, high[at] ?? 0];
          const title = `${percent(at / n, 0)} to ${percent((at + 1) / n, 0)}: ${b} ${names[1]}, ${a} ${names[0]}`;
          return (
            <g key={at}>
              <title>{title}</title>
              <rect x={at * step} y={0} width={step} height={height} fill="transparent" />
              <rect x={at * step + 1} y={height - tall(a)} width={step - 2} height={tall(a)} fill={`url(#${id})`} />
              <rect x={at * step + 1} y={height - tall(a) - tall(b)} width={step - 2} height={tall(b)} fill="var(--c0)" />
            </g>
          );
        })}
        {[0, 0.25, 0.5, 0.75, 1].map((x) => (
          <text key={x} x={x * width} y={height + 16} textAnchor="middle">
            {`${100 * x}%`}
          </text>
        ))}
      </svg>
      <ul className="legend">
        <li>
          <span className="swatch" style={{ background: "var(--c0)" }} />
          {names[1]} <b>{whole(sum(high))}</b>
        </li>
        <li>
          <span className="swatch striped" />
          {names[0]} <b>{whole(sum(low))}</b>
        </li>
      </ul>
    </figure>
  );
}

/** The field that narrows a list by its text. */
export function FilterField(props: { field: Ref<HTMLInputElement>; label: string; placeholder: string; value: string; change: (text: string) => void }) {
  return (
    <TextInput
      ref={props.field}
      className="grow"
      size="xs"
      type="search"
      aria-label={props.label}
      placeholder={props.placeholder}
      leftSection={<Icon name="search" />}
      value={props.value}
      onChange={(event) => props.change(event.currentTarget.value)}
    />
  );
}

// ------------------------------------------------------------------------------------------------- texts and tables

/** A text from outside: the beginning of it, and all of it on a click. */
export function Long(props: {
  text: string;
  cap?: number;
  lines?: number;
  className?: string;
  open?: boolean;
  onOpen?: (open: boolean) => void;
}) {
  const { text, cap = 1200, lines = 14 } = props;
  const [own, set] = useState(false);
  const open = props.open ?? own;
  const short = shorten(text, cap, lines);
  return (
    <>
      <div className={props.className ?? "text"}>{open ? text : short}</div>
      {short.length < text.length && (
        <button className="more" aria-expanded={open} onClick={() => (props.onOpen ?? set)(!open)}>
          {open ? "Show less" : `Show all ${plural(text.length, "character")}`}
        </button>
      )}
    </>
  );
}

export function shorten(text: string, cap: number, lines: number): string {
  let end = text.length > cap * 1.25 ? cap : text.length;
  for (let n = 0, at = -1; n < lines; n++) {
    at = text.indexOf("\n", at + 1);
    if (at < 0) break;
    if (n === lines - 1 && at < end && text.length - at > 40) end = at;
  }
  // No half of a surrogate pair.
  if (end < text.length && /[\ud800-\udbff]/.test(text[end - 1] ?? "")) end -= 1;
  return end < text.length ? text.slice(0, end) + "…" : text;
}

export interface Col<T> {
  name: string;
  cell: (row: T, at: number) => ReactNode;
  num?: boolean;
  grow?: boolean;
  title?: string;
  /** Left out on narrow screens. */
  wide?: boolean;
}

const classOf = <T,>(col: Col<T>, body: boolean) =>
  [col.num && "num", body && col.grow && "grow", col.wide && "big-only"].filter(Boolean).join(" ") || undefined;

interface TableProps<T> {
  label: string;
  cols: Col<T>[];
  rows: T[];
  most?: number;
  card?: boolean;
  /** Names the rows of a list whose order changes. */
  id?: (row: T) => string;
}

/** A section that is one table. */
export function Listing<T>({ title, aside, ...table }: Omit<TableProps<T>, "label" | "card"> & { title: string; aside?: ReactNode }) {
  return (
    <Section title={title} aside={aside}>
      <Table card label={title} {...table} />
    </Section>
  );
}

/** A small table, scrolled sideways where it is wider than the screen. */
export function Table<T>(props: TableProps<T>) {
  const { cols, rows, most = 50 } = props;
  const [all, set] = useState(false);
  const shown = all ? rows : rows.slice(0, most);
  const table = (
    <div className="scroll" role="group" aria-label={props.label} tabIndex={0}>
      <table className={props.card ? "table rows" : "table"}>
        <thead>
          <tr>
            {cols.map((col) => (
              <th key={col.name} scope="col" className={classOf(col, false)} title={col.title}>
                {col.name || <span className="hidden">{col.title ?? "Row"}</span>}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map((row, at) => (
            <tr key={props.id?.(row) ?? at}>
              {cols.map((col) => (
                <td key={col.name} className={classOf(col, true)}>
                  {col.cell(row, at)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
  return (
    <>
      {props.card ? <div className="card flush">{table}</div> : table}
      {rows.length > most && (
        <button className="more" aria-expanded={all} onClick={() => set(!all)}>
          {all ? "Show fewer" : `Show all ${whole(rows.length)} rows`}
        </button>
      )}
    </>
  );
}

/** The JSON of a manifest or a configuration, on a click. */
export function Raw({ title, value }: { title: string; value: unknown }) {
  const [open, set] = useState(false);
  return (
    <details onToggle={(event) => set(event.currentTarget.open)}>
      <summary className="soft">{title}</summary>
      {open && (
        <pre className="block" tabIndex={0} style={{ marginTop: 8, maxHeight: 480, overflow: "auto" }}>
          {JSON.stringify(value, null, 2)}
        </pre>
      )}
    </details>
  );
}

/** A picture of the server or of the report; an address of anything else is not shown. */
export function Shot(props: { src: string; alt: string; className?: string; link?: boolean }) {
  const [broken, set] = useState(false);
  if (broken || !/^(\/api\/|data:image\/)/.test(props.src))
    return <p className="soft">{props.alt}: this picture cannot be shown.</p>;
  const image = <img className={props.className} src={props.src} alt={props.alt} onError={() => set(true)} />;
  return props.link && props.src.startsWith("/api/") ? (
    <a href={props.src} target="_blank" rel="noreferrer">
      {image}
    </a>
  ) : (
    image
  );
}
