#!/usr/bin/env bash
echo 820 > total.txt
