/**
 * Answers of the server, or of the object that is embedded in a report.
 *
 * An answer stays shown while a newer one is on its way: nothing flickers, and nothing loses its place.
 */
import { useCallback, useEffect, useRef, useState, useSyncExternalStore } from "react";
import type { Embedded, LiveEvent, Page, Source, Sources } from "./api";
import { answerFrom } from "./embedded";

const holder = document.getElementById("clawgym-data");
/** What is inside of a mailable report; null where a server answers. */
export const embedded: Embedded | null = holder ? (JSON.parse(holder.textContent ?? "{}") as Embedded) : null;

export class Failed extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** The answer at an address below `/api/`. Raises {@link Failed} with what the server says. */
export async function get<T>(address: string, signal?: AbortSignal): Promise<T> {
  if (embedded) {
    const found = answerFrom(embedded, address);
    if (found === undefined)
      throw new Failed("This report does not contain that. Open the run with `clawgym view` to see it.", 404);
    return found as T;
  }
  return answer<T>(await ask(address, { signal: signal ?? null }));
}

/** Ask the server to do something (only where it was started with --write). */
export async function post<T>(address: string, body: unknown): Promise<T> {
  const headers = { "Content-Type": "application/json" };
  return answer<T>(await ask(address, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function ask(address: string, options: RequestInit): Promise<Response> {
  try {
    return await fetch("/api/" + address, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Failed("The viewer does not answer. Start it again: clawgym view", 0);
  }
}

async function answer<T>(response: Response): Promise<T> {
  const text = await response.text();
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Failed(`The answer cannot be read (status ${response.status}).`, response.status);
  }
  if (response.ok) return body as T;
  const told = (body as { error?: unknown } | null)?.error;
  throw new Failed(typeof told === "string" ? told : `The viewer answered ${response.status}.`, response.status);
}

export function query(values: Record<string, string | number | null | undefined>): string {
  const out = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) if (value != null && value !== "") out.set(name, String(value));
  const text = out.toString();
  return text ? "?" + text : "";
}

/** What is known of an answer. `data` stays while `loading` a newer one. */
export interface Asked<T> {
  data: T | undefined;
  error: Failed | undefined;
  loading: boolean;
  again: () => void;
}

const KEPT = new Map<string, unknown>();
const MOST = 60;

function keep(address: string, data: unknown) {
  KEPT.delete(address);
  KEPT.set(address, data);
  if (KEPT.size > MOST) KEPT.delete(KEPT.keys().next().value as string);
}

/** The answer at an address, again whenever the source `live` changes. `null` asks nothing. */
export function useAnswer<T>(address: string | null, live?: string): Asked<T> {
  const [state, set] = useState<{ address: string | null; data?: T; error?: Failed; loading: boolean }>(() => ({
    address,
    data: address ? (KEPT.get(address) as T | undefined) : undefined,
    loading: address !== null,
  }));
  const [round, next] = useState(0);
  const changed = useChanged(live);
  useEffect(() => {
    if (address === null) return;
    const stop = new AbortController();
    set((old) =>
      old.address === address
        ? { ...old, loading: true }
        : { address, data: KEPT.get(address) as T | undefined, loading: true },
    );
    get<T>(address, stop.signal).then(
      (data) => {
        if (stop.signal.aborted) return;
        keep(address, data);
        set({ address, data, loading: false });
      },
      (error: unknown) => {
        if (stop.signal.aborted) return;
        const failed = error instanceof Failed ? error : new Failed(String(error), -1);
        set((old) => ({ ...old, error: failed, loading: false }));
      },
    );
    return () => stop.abort();
  }, [address, round, changed]);
  const again = useCallback(() => next((n) => n + 1), []);
  const mine = state.address === address;
  return {
    data: mine ? state.data : address ? (KEPT.get(address) as T | undefined) : undefined,
    error: mine ? state.error : undefined,
    loading: mine ? state.loading : address !== null,
    again,
  };
}

/** The source with an id, once the list of sources is there. */
export function useSource(id: string | null): Source | undefined {
  const sources = useAnswer<Sources>(id === null ? null : "sources");
  return sources.data?.sources.find((source) => source.id === id);
}

/** A long list of which only the pages that are looked at are loaded. */
export interface Paged<T> {
  total: number | undefined;
  /** Before filtering. */
  all: number | undefined;
  row: (index: number) => T | undefined;
  /** Say which rows are looked at. */
  show: (first: number, last: number) => void;
  error: Failed | undefined;
  again: () => void;
  note: string;
}

/** The list at an address, without its offset and limit. */
export function usePaged<T>(address: string, live?: string, size = 100): Paged<T> {
  const key = address;
  const [, redraw] = useState(0);
  const changed = useChanged(live);
  const state = useRef({
    key: "",
    pages: new Map<number, T[]>(),
    fresh: new Set<number>(),
    flying: new Map<number, AbortController>(),
    total: undefined as number | undefined,
    all: undefined as number | undefined,
    error: undefined as Failed | undefined,
    note: "",
    seen: [0, 0] as [number, number],
  });
  const now = state.current;
  if (now.key !== key) {
    for (const flight of now.flying.values()) flight.abort();
    // The number of rows stays until the new one is known, so that the page does not jump.
    Object.assign(now, { key, pages: new Map(), fresh: new Set(), flying: new Map(), error: undefined, seen: [0, 0] });
  }

  const load = useCallback((page: number) => {
    const s = state.current;
    if (s.fresh.has(page) || s.flying.has(page)) return;
    const stop = new AbortController();
    s.flying.set(page, stop);
    const asked = s.key;
    const part = `offset=${page * size}&limit=${size}`;
    get<Page<T>>(asked + (asked.includes("?") ? "&" : "?") + part, stop.signal).then(
      (data) => {
        if (stop.signal.aborted || state.current.key !== asked) return;
        s.flying.delete(page);
        s.pages.set(page, data.items);
        s.fresh.add(page);
        if (s.pages.size > 40) {
          const far = [...s.pages.keys()].sort((a, b) => Math.abs(b - page) - Math.abs(a - page))[0];
          if (far !== undefined && far !== page) {
            s.pages.delete(far);
            s.fresh.delete(far);
          }
        }
        s.total = data.total;
        s.all = data.all;
        s.note = data.note;
        s.error = undefined;
        redraw((n) => n + 1);
      },
      (error: unknown) => {
        if (stop.signal.aborted) return;
        s.flying.delete(page);
        s.error = error instanceof Failed ? error : new Failed(String(error), -1);
        redraw((n) => n + 1);
      },
    );
  }, [size]);

  const show = useCallback(
    (first: number, last: number) => {
      const s = state.current;
      s.seen = [Math.floor(Math.max(0, first) / size), Math.floor(Math.max(0, last) / size)];
      // Pages that were scrolled past are not waited for.
      for (const [page, flight] of s.flying)
        if (page < s.seen[0] - 1 || page > s.seen[1] + 1) {
          flight.abort();
          s.flying.delete(page);
        }
      for (let page = s.seen[0]; page <= s.seen[1]; page++) load(page);
    },
    [load, size],
  );

  const again = useCallback(() => {
    const s = state.current;
    s.fresh.clear();
    s.error = undefined;
    for (let page = s.seen[0]; page <= s.seen[1]; page++) load(page);
  }, [load]);

  useEffect(() => again(), [key, changed, again]);
  useEffect(() => {
    const { flying } = state.current;
    return () => flying.forEach((flight) => flight.abort());
  }, []);

  const row = (index: number) => now.pages.get(Math.floor(index / size))?.[index % size];
  return { total: now.total, all: now.all, row, show, error: now.error, again, note: now.note };
}

// ---------------------------------------------------------------------------------------------- live updates

const counts = new Map<string, number>();
const listeners = new Set<() => void>();
let stream: EventSource | undefined;
let state: "off" | "connecting" | "open" | "lost" = "off";

function tell(...names: string[]) {
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  for (const listener of listeners) listener();
}

/** Changes come in bursts, from a run that ends an episode each moment: they are told together. */
const waiting = new Set<string>();

function soon(...names: string[]) {
  if (!waiting.size)
    setTimeout(() => {
      const told = [...waiting];
      waiting.clear();
      tell(...told);
    }, 500);
  for (const name of names) waiting.add(name);
}

function heard(event: MessageEvent<string>) {
  let told: LiveEvent;
  try {
    told = JSON.parse(event.data) as LiveEvent;
  } catch {
    return;
  }
  if (told.kind === "source") soon(told.id, "sources");
  else soon(told.kind);
}

/** Begin to listen for changes. */
export function listen(): void {
  if (embedded || stream) return;
  stream = new EventSource("/api/events");
  const began = performance.now();
  state = "connecting";
  stream.onopen = () => {
    const late = state === "lost" || performance.now() - began > 300;
    state = "open";
    // What changed in the meantime is unknown.
    tell(...(late ? counts.keys() : []));
  };
  stream.onmessage = heard;
  stream.onerror = () => {
    state = "lost";
    tell();
  };
}

const subscribe = (listener: () => void) => {
  listeners.add(listener);
  return () => void listeners.delete(listener);
};

/** A number that grows whenever a source changes: the id of one, "sources" or "live". */
export function useChanged(source?: string): number {
  useEffect(() => {
    if (source && !counts.has(source)) counts.set(source, 0);
  }, [source]);
  return useSyncExternalStore(subscribe, () => (source ? (counts.get(source) ?? 0) : 0));
}

export function useConnection() {
  return useSyncExternalStore(subscribe, () => state);
}
