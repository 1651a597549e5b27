/** What lists have in common: filters in the address, and files with what is shown. */
import { Button, NativeSelect, type NativeSelectProps } from "@mantine/core";
import { embedded, query as asQuery } from "./data";
import { Icon } from "./icons";
import { useQuery } from "./router";

interface ChoiceProps extends Omit<NativeSelectProps, "label" | "value" | "onChange"> {
  label: string;
  value: string;
  onChange: (value: string) => void;
  options: [string, string][];
  /** The text of the empty choice, if there is one. */
  first?: string;
}

/** One of some values. A value that is not among them, out of an address, is shown as it is. */
export function Choice({ label, value, onChange, options, first, ...more }: ChoiceProps) {
  const known = !value || options.some(([name]) => name === value);
  return (
    <NativeSelect size="xs" aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value)} {...more}>
      {first !== undefined && <option value="">{first}</option>}
      {!known && <option value={value}>{value}</option>}
      {options.slice(0, 500).map(([name, text]) => (
        <option key={name} value={name}>
          {text.length > 80 ? text.slice(0, 80) + "…" : text}
        </option>
      ))}
    </NativeSelect>
  );
}

/** A filter of a list. */
export function Select({ value, ...props }: { label: string; value: string | null; onChange: (value: string) => void; options: [string, string][] }) {
  return <Choice first={`${props.label}: all`} value={value ?? ""} style={{ maxWidth: 240 }} {...props} />;
}

/** A button that removes parameters of the address. */
export function Clear({ names }: { names: readonly string[] }) {
  const [, change] = useQuery();
  return (
    <button className="more" onClick={() => change(Object.fromEntries(names.map((name) => [name, ""])))}>
      Clear filters
    </button>
  );
}

const FORMATS = { csv: "CSV", jsonl: "JSON Lines" };

/** Files with what the filters leave, in the order that is shown. */
export function Exports({ address, name }: { address: string; name: string }) {
  if (embedded) return null;
  return Object.entries(FORMATS).map(([format, label]) => (
    <Button
      key={format}
      component="a"
      href={`/api/${address}${address.includes("?") ? "&" : "?"}format=${format}`}
      download={`${name}.${format}`}
      variant="default"
      size="xs"
      leftSection={<Icon name="save" />}
      aria-label={`Export what is shown as ${label}`}
    >
      {label}
    </Button>
  ));
}

/** The filters of the episodes of a run. */
export const FILTERS = ["outcome", "category", "check", "q"] as const;

/** The query that a list of episodes is asked with, out of a page's address. */
export function listQuery(query: URLSearchParams): string {
  return asQuery({ sort: query.get("sort") ?? "order", ...Object.fromEntries(FILTERS.map((name) => [name, query.get(name)])) });
}
