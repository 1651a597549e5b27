import { createRoot } from "react-dom/client";
import { MantineProvider, Button, Tabs, SegmentedControl, NativeSelect, TextInput, Badge, Table, ActionIcon, Alert, Checkbox,Anchor,Breadcrumbs,Skeleton,Kbd } from "@mantine/core";
console.log(Tabs,SegmentedControl,NativeSelect,TextInput,Badge,Table,ActionIcon,Alert,Checkbox,Anchor,Breadcrumbs,Skeleton,Kbd);
createRoot(document.getElementById("root")!).render(<MantineProvider><Button>hey</Button></MantineProvider>);
