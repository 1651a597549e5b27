/** A table of which only the rows on the screen are in the document, and only the pages that are looked at are loaded. */
import { useMediaQuery } from "@mantine/hooks";
import { useWindowVirtualizer } from "@tanstack/react-virtual";
import { useCallback, useEffect, useLayoutEffect, useRef, useState, type ReactNode } from "react";
import type { Paged } from "./data";
import { plural, whole } from "./format";
import { Icon } from "./icons";
import { useKeys } from "./keys";
import { Blank, Notice, Problem } from "./ui";

export interface VCol<T> {
  /** Key of the sort, if the list can be sorted by it. */
  sort?: string;
  name: string;
  cell: (row: T, index: number) => ReactNode;
  /** A size of CSS grid. */
  width: string;
  num?: boolean;
  /** Whether it is shown on a phone. */
  phone?: boolean;
  title?: string;
}

export const BAR = 48;

/** The distance of an element from the top of the document. */
export function useTop<E extends HTMLElement>(): [React.RefObject<E | null>, number] {
  const ref = useRef<E>(null);
  const [top, set] = useState(0);
  useLayoutEffect(() => {
    const measure = () => {
      if (ref.current) set(Math.round(ref.current.getBoundingClientRect().top + scrollY));
    };
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(document.body);
    return () => watch.disconnect();
  }, []);
  return [ref, top];
}

export function VirtualTable<T>(props: {
  label: string;
  list: Paged<T>;
  cols: VCol<T>[];
  sort: string;
  onSort: (sort: string) => void;
  empty: ReactNode;
}) {
  const { list, sort } = props;
  const phone = useMediaQuery("(max-width: 40em)", undefined, { getInitialValueInEffect: false }) ?? false;
  const cols = phone ? props.cols.filter((col) => col.phone) : props.cols;
  const height = phone ? 56 : 44;
  const total = list.total ?? 0;
  const [body, top] = useTop<HTMLDivElement>();
  const rows = useWindowVirtualizer({
    count: total,
    estimateSize: () => height,
    overscan: 12,
    scrollMargin: top,
    scrollPaddingStart: BAR + 40,
    scrollPaddingEnd: 60,
  });
  useEffect(() => rows.measure(), [height, rows]);
  const items = rows.getVirtualItems();
  const [first, last] = [items[0]?.index ?? 0, items[items.length - 1]?.index ?? 0];
  const { show } = list;
  useEffect(() => show(first, last), [show, first, last]);

  const wanted = useRef<number | null>(null);
  const focus = useCallback(
    (index: number) => {
      const found = body.current?.querySelector<HTMLElement>(`[data-index="${index}"] .open`);
      if (!found) return false;
      found.focus({ preventScroll: true });
      return true;
    },
    [body],
  );
  useEffect(() => {
    if (wanted.current !== null && focus(wanted.current)) wanted.current = null;
  });
  const move = (by: number) => {
    if (!total) return false;
    const row = document.activeElement?.closest<HTMLElement>("[data-index]");
    const here = row && body.current?.contains(row) ? Number(row.dataset.index) : by > 0 ? first - 1 : last + 1;
    const next = Math.min(total - 1, Math.max(0, here + by));
    wanted.current = next;
    rows.scrollToIndex(next, { align: "auto" });
    if (focus(next)) wanted.current = null;
    return true;
  };
  useKeys({ j: () => move(1), k: () => move(-1) });

  const grid = { gridTemplateColumns: cols.map((col) => col.width).join(" ") };
  if (list.error && !total) return <Problem error={list.error} again={list.again} />;
  return (
    <>
      {list.error && (
        <Notice kind="warn">
          {list.error.message}{" "}
          <button className="more" onClick={list.again}>
            Try again
          </button>
        </Notice>
      )}
      {list.note && <Notice>{list.note}</Notice>}
      {list.total === 0 ? (
        <div className="vt">{props.empty ?? <Blank small title="Nothing is here" />}</div>
      ) : (
        <div className="vt" role="table" aria-label={props.label} aria-rowcount={total + 1} aria-busy={list.total === undefined}>
          <div role="rowgroup" className="vt-head" style={{ display: "grid", alignItems: "center" }}>
            <div role="row" aria-rowindex={1} style={grid}>
              {cols.map((col) => {
                const by = sort.replace(/^-/, "") === col.sort && col.sort ? (sort.startsWith("-") ? "descending" : "ascending") : undefined;
                return (
                  <div key={col.name} role="columnheader" aria-sort={by} className={col.num ? "num" : undefined} title={col.title}>
                    {col.sort ? (
                      <button
                        onClick={() => {
                          const name = col.sort ?? "";
                          // Numbers are looked for from the largest down.
                          props.onSort(by ? (by === "ascending" ? "-" + name : name) : col.num ? "-" + name : name);
                        }}
                      >
                        {col.name}
                        {by && <Icon name={by === "ascending" ? "up" : "down"} size={12} />}
                      </button>
                    ) : (
                      col.name
                    )}
                  </div>
                );
              })}
            </div>
          </div>
          <div ref={body} role="rowgroup" className="vt-body" style={{ height: list.total === undefined ? height * 8 : rows.getTotalSize() }}>
            {items.map((item) => {
              const row = list.row(item.index);
              return (
                <div
                  key={item.key}
                  role="row"
                  data-index={item.index}
                  aria-rowindex={item.index + 2}
                  style={{ ...grid, height, transform: `translateY(${item.start - top}px)` }}
                >
                  {cols.map((col) => (
                    <div key={col.name} role="cell" className={col.num ? "num" : "cut"}>
                      {row === undefined ? <div className="ghost" style={{ width: "60%" }} /> : col.cell(row, item.index)}
                    </div>
                  ))}
                </div>
              );
            })}
          </div>
        </div>
      )}
    </>
  );
}

/** "1,204 of 5,000 episodes". */
export function Found({ list, one }: { list: { total: number | undefined; all: number | undefined }; one: string }) {
  const { total, all } = list;
  if (total === undefined) return null;
  return (
    <span className="soft" role="status">
      {all !== undefined && all !== total ? `${whole(total)} of ${plural(all, one)}` : plural(total, one)}
    </span>
  );
}
