#!/usr/bin/env bash
# Write the report script in bash built-ins only, and run it.
set -euo pipefail
mkdir -p output
cat > output/build_reports.txt <<'SCRIPT'
#!/usr/bin/env bash
# Joins input/customers.csv and input/orders.csv. Only shell built-ins; runs on bash 3.2 and later.
# Amounts are summed in cents.

to_cents() {
    local amount=$1 whole fraction sign=1
    case $amount in -*) sign=-1 amount=${amount#-} ;; esac
    whole=${amount%%.*}
    fraction=00
    case $amount in *.*) fraction=${amount#*.}00 ;; esac
    cents=$((sign * (10#${whole:-0} * 100 + 10#${fraction:0:2})))
}

to_amount() {
    local sign= value=$1
    if [ "$value" -lt 0 ]; then sign=- value=$((-value)); fi
    local rest=0$((value % 100))
    amount=$sign$((value / 100)).${rest:$((${#rest} - 2))}
}

json_text() {
    text=${1//\\/\\\\}
    text=\"${text//\"/\\\"}\"
}

ids=() names=() counts=() totals=()
customers=0
{
    read -r header
    while IFS=, read -r id name _ || [ -n "$id" ]; do
        name=${name%$'\r'}
        [ -n "$id" ] || continue
        ids[customers]=$id names[customers]=$name counts[customers]=0 totals[customers]=0
        customers=$((customers + 1))
    done
} < input/customers.csv

orders=0
{
    read -r header
    while IFS=, read -r order customer amount _ || [ -n "$order" ]; do
        [ -n "$order" ] || continue
        to_cents "${amount%$'\r'}"
        name=
        for ((i = 0; i < customers; i++)); do
            if [ "${ids[i]}" = "$customer" ]; then
                name=${names[i]}
                counts[i]=$((counts[i] + 1))
                totals[i]=$((totals[i] + cents))
                break
            fi
        done
        to_amount "$cents"
        json_text "$order" && line="{\"order_id\":$text"
        json_text "$customer" && line="$line,\"customer_id\":$text"
        json_text "$name" && line="$line,\"customer_name\":$text"
        echo "$line,\"amount\":\"$amount\"}"
        orders=$((orders + 1))
    done
} < input/orders.csv > output/orders.jsonl

{
    echo "Customer report"
    for ((i = 0; i < customers; i++)); do
        to_amount "${totals[i]}"
        echo "- ${names[i]} (${ids[i]}): orders=${counts[i]}, total=$amount"
    done
} > output/report.txt

echo "OK: generated $orders orders for $customers customers"
SCRIPT

cat > output/README.md <<'README'
# Customer and order reports

Run in the folder that holds `input/` and `output/`:

    bash output/build_reports.txt

It reads `input/customers.csv` and `input/orders.csv`, writes `output/report.txt` and `output/orders.jsonl` anew, and
prints one line with the two counts. It needs bash and nothing else.
README

bash output/build_reports.txt
