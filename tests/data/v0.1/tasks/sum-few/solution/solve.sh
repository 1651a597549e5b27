#!/usr/bin/env bash
echo 12 > total.txt
